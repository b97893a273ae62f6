"""A script's own JAX parameters and optax transformation, whose loop the script has: what
hvdtrain.init() prepares."""
