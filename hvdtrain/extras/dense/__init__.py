"""Dense layers partitioned over ranks, after convolutions that every rank computes on its own
samples (Krizhevsky 2014, arXiv:1404.5997)."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Divides the neurons of dense layers among ranks; each computes its part for all samples.",
    needs=("divided",),
)
