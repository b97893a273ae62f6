"""Tasks with several labels."""
