"""The optimizers that optim.name selects: one file each, written once for all frameworks."""
