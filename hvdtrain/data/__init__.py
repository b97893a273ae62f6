"""Where samples come from, and which of them each rank reads."""
