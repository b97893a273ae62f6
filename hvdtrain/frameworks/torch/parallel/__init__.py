"""Ways to distribute a model and to reduce gradients, one file or folder each; arrangements.py
lists them."""
