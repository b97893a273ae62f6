"""The replicas of the model on all ranks: equal before the first step, compared later."""
