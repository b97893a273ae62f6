"""Plugins of hvdtrain/frameworks/torch/models."""
