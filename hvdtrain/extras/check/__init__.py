"""`check`: reports what would go wrong with these ranks, and what to do. Trains nothing."""
