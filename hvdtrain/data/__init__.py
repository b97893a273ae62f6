"""Where samples come from, and which of them a rank reads."""
