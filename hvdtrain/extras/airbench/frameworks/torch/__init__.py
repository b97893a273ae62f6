"""Plugins of hvdtrain/frameworks/torch."""
