"""Models of timm and transformers by name, and the names of weights in their files."""
