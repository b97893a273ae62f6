"""Extras: one folder for each feature that most users never need; docs/extras.md."""
