"""Batch norm over ghost batches, and over all ranks."""
