"""What a job would do, computed without a step: its data, steps, layers and memory."""
