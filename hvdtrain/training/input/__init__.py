"""The samples of each step: split into micro-batches, and read ahead on threads."""
