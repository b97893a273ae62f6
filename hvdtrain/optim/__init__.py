"""The optimizers that optim.name knows, each a pair of functions over arrays of any framework."""
