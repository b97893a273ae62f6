"""What the rest of hvdtrain learns of parallel.dense."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Divides the neurons of dense layers among ranks; each computes its part for all samples.",
)
