"""Samples that are drawn by weight."""
