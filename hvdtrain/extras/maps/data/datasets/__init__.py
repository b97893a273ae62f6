"""Data sets of images with masks."""
