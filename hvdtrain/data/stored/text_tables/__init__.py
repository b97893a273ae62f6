"""Tables of text: their first line, the ends of their lines, and the numbers in their cells."""
