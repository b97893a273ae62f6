"""Several sequences of tokens in one row."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Packs several variable-length sequences of tokens into one row.",
    implements={
        "data.pack": "hvdtrain.extras.packing.packed",
    },
)
