"""`evaluate` and `predict`: what the model of a run says about images, on any number of ranks; nothing is trained."""
