"""Torch models and optimizers of custom loops, as hvdtrain.init() prepares them."""
