"""Optimizers of PyTorch: our rules as torch.optim.Optimizer, and a user's own class."""
