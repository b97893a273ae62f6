"""Reads runs from their folders: as numbers, and as a DataFrame."""
