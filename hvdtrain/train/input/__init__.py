"""The samples of each step: planned, read ahead on threads, cut into micro-batches."""
