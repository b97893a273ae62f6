"""What every package shares: progress, seeds, arrays and their digests, sums, this process, the
import of torchvision. No ranks."""
