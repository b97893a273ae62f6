"""hvdtrain export: the weights of a run, or its model with them, for other software."""
