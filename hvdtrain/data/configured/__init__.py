"""The data that a configuration means: opened, divided, padded, weighted, with names of classes."""
