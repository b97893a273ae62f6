"""The registration of context parallelism as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="experimental",
    says="Divides the positions of long sequences among ranks, also in attention.",
)
