"""Data as sequences of tokens: images by a codebook of colours, and text."""
