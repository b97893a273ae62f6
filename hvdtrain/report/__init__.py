"""Reads a run from its folder: as a DataFrame, as numbers, or as one HTML page with figures."""
