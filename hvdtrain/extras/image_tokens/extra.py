"""What the rest of hvdtrain learns of data.name=image_tokens."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on images as sequences of color tokens from a small palette, like image GPT.",
    token_images=("image_tokens",),
)
