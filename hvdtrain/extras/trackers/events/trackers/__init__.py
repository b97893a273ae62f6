"""Plugins of hvdtrain/events/trackers."""
