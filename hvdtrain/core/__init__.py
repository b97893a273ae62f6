"""What every package shares: progress, seeds, arrays and their digests, sums, lengths, this
process, the import of torchvision, which extras are here. No ranks."""
