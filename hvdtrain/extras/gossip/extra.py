"""The registration of gossip as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="experimental",
    says="Averages the weights of ranks with those of one neighbour, between averages over all.",
)
