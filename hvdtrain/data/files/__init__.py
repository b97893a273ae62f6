"""Files of data sets: downloaded once, copied near the ranks, found inside tar archives."""
