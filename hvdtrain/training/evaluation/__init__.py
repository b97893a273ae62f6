"""A run's model without its training: its weights on every rank, what it says about samples, and how often it is right."""
