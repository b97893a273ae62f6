"""What every package shares: progress, seeds, arrays, sums, digests, the import of torchvision. No I/O, no ranks."""
