"""Streams: data that are read in an order of their own, such as an IterableDataset or a
generator."""
