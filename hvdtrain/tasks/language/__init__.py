"""The next token of each position of a window of tokens."""
