"""Measurements of a job: seconds of each phase of a step, memory, and the duration of the
start."""
