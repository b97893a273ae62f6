"""Stronger augmentation of images: RandAugment, color jitter, erasing; and test-time views."""
