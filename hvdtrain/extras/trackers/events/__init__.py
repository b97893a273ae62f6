"""Plugins of hvdtrain/events."""
