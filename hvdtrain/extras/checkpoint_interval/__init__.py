"""The cheapest time between two checkpoints."""
