"""What steps take beside samples: seconds by phase, memory, energy, the time of the start."""
