"""Data of maps."""
