"""`check`: what would go wrong with these ranks, and what to do; trains nothing."""
