"""`export`: the weights of one checkpoint, for inference elsewhere."""
