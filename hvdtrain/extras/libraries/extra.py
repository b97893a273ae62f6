"""The registration of models of other libraries as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains models of timm and transformers by name.",
    libraries={
        "timm": "hvdtrain.extras.libraries.timm",
        "transformers": "hvdtrain.extras.libraries.transformers",
    },
)
