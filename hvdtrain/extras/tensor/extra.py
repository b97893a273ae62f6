"""The registration of tensor parallelism as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Divides each layer of a model among ranks, which compute it together.",
)
