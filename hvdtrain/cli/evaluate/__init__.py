"""`evaluate`, `predict` and `sample`: apply the model of a run on any number of ranks, without
training."""
