"""guard.lost: jobs and loops that survive the loss of ranks."""
