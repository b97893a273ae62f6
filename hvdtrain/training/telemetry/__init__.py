"""Measurements of a job: seconds of each phase of a step, memory, and what gauges measure."""
