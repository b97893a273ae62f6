"""data.name=image_tokens: images of another data set as tokens of a codebook."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on images as sequences of color tokens from a small palette, like image GPT.",
    token_images=("image_tokens",),
)
