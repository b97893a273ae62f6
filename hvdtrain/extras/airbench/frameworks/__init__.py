"""Plugins of hvdtrain/frameworks."""
