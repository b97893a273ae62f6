"""Targets that are samples some steps later."""
