"""Code that every package shares: progress, seeds, arrays and their digests, sums, lengths, this
process, the import of torchvision, the installed extras. Nothing about ranks."""
