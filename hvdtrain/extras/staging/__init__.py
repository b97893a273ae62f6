"""data.stage: copies the data to the local disk of each node."""
