"""Reads runs from their folders: as numbers, as a DataFrame, and what differs between them."""
