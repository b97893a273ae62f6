"""Calls on tensors of TensorFlow, JAX and Keras, also inside of functions that TensorFlow or JAX
compiles."""
