"""What a model gets of the field x: as the data have it, standardized, or as images normalized by channel."""
