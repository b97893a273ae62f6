"""model.weights: loads the weights of a file or folder instead of the initial weights."""
