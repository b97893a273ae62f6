"""A script's own loop with what the trainer has: samples, strategies, checkpoints, stops, events.
hvdtrain.init() makes a Context."""
