"""Tables of text: their first line, and the ends of their lines."""
