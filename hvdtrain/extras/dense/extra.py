"""The registration of parallel.dense as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Divides the neurons of dense layers among ranks; each computes its part for all samples.",
)
