"""data.name=image_tokens: images of another data set as tokens of a codebook."""
