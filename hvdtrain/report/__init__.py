"""A run read back from its folder: as a DataFrame, as numbers, as one HTML page with figures."""
