"""Ways to have a model on ranks, and to make their gradients one: a file or a folder each, which
arrangements.py names."""
