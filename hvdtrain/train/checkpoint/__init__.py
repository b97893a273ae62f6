"""Checkpoints: the files, when they are written, and what a job resumes from."""
