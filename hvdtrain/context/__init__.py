"""Custom loops of scripts, with the trainer's samples, strategies, checkpoints, stops and events.
hvdtrain.init() creates a Context."""
