"""PyTorch optimizers: hvdtrain's rules as torch.optim.Optimizer, and user classes."""
