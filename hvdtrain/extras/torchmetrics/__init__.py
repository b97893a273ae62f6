"""Metrics of torchmetrics, computed over all ranks."""
