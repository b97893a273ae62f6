"""The framework JAX: model, compiled step, learner, and how its ranks work together."""
