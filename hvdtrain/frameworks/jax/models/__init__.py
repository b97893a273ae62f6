"""The models that model.name knows with framework=jax: one file each."""
