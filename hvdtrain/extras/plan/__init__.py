"""`plan` and `summary`: what a job would do on several numbers of ranks, without training."""
