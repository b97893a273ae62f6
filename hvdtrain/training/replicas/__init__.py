"""The replicas of the model on all ranks: made equal before the first step, compared later."""
