"""The framework JAX: model, compiled step, learner."""
