"""model.name=airbench: a network for CIFAR-10 whose first layer comes from training samples."""
