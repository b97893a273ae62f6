"""Finding images in folders and archives, decoding them, packing them into array files, and
augmenting them."""
