"""JAX parameters and optax transformations of custom loops, as hvdtrain.init() prepares them."""
