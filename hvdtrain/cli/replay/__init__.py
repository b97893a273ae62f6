"""hvdtrain replay: asynchronous training again, from the log of its updates."""
