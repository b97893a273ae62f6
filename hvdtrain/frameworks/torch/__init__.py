"""The framework PyTorch: model, precision, inputs, gradients of one rank."""
