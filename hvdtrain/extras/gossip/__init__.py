"""Gossip: between two averages over all ranks, a rank averages its weights with one neighbour."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="experimental",
    says="Averages the weights of ranks with those of one neighbour, between averages over all.",
)
