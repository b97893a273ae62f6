"""Forecasts of a job without running a step: its data, steps, layers and memory."""
