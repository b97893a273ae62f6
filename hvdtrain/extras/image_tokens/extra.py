"""What the rest of hvdtrain learns of data.name=image_tokens."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on images as sequences of tokens, the numbers of few colours, as image GPTs do.",
    token_images=("image_tokens",),
)
