"""Runs one job, from its configuration to its last line. Read loop.py first; job.py defines its
parts, train_job.py their order."""
