"""Context parallelism: ranks divide the positions of a sequence, also in attention (Liu et al.
2023, arXiv:2310.01889; Jacobs et al. 2023, arXiv:2309.14509)."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="experimental",
    says="Divides the positions of long sequences among ranks, also in attention.",
    needs=("divided",),
)
