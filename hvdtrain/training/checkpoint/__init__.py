"""Checkpoints: their files, when they are written, and how a job resumes from them."""
