"""Models of timm and transformers by name, and the names of weights in their files."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains models of timm and transformers by name.",
    libraries={
        "timm": "hvdtrain.extras.libraries.timm",
        "transformers": "hvdtrain.extras.libraries.transformers",
    },
)
