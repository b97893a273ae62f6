"""Checkpoints: their files, when they are written, and what a job resumes from."""
