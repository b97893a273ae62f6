"""What every package shares: progress, seeds, arrays and their digests, sums, the end of a process, the import of torchvision. No ranks."""
