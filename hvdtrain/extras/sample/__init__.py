"""hvdtrain sample: draws images or text with the model of a run."""
