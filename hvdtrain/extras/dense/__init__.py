"""Dense layers partitioned over ranks, after convolutions that every rank computes on its own
samples (Krizhevsky 2014, arXiv:1404.5997)."""
