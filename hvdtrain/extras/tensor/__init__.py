"""Tensor parallelism: layers that are cut over the ranks of a group (Shoeybi et al. 2019,
arXiv:1909.08053, section 3)."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Divides each layer of a model among ranks, which compute it together.",
    needs=("divided",),
)
