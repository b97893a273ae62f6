"""hvdtrain predict: the outputs of a run's model for files of images and numbers."""
