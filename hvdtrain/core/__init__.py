"""The nouns that every package shares: progress, seeds, arrays, sums, digests. No I/O, no ranks."""
