"""Learning rate, batch size and noise of each step, as pure functions of progress."""
