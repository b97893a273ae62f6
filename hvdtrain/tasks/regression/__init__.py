"""Numbers to predict, one or several of each sample."""
