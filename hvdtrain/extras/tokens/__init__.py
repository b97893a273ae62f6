"""Files of token ids: data.name=tokens trains on them, and `hvdtrain tokenize` writes them."""
