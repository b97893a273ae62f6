"""Sequences that a model with task.name=language draws: by all ranks together, and from time to time in a job."""
