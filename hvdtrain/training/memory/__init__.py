"""The memory of a job: what it will take, what a rank has, the micro-batch that fits, and what it took."""
