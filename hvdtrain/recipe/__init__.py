"""Every number of one step as a pure function of progress: learning rate, batch size, noise."""
