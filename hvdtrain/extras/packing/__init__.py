"""Several sequences of tokens in one row."""
