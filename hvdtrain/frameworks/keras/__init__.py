"""The framework Keras: a user's keras.Model on any backend, also as a torch module."""
