"""What the rest of hvdtrain learns of parallel.dense."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Each rank has some of the neurons of the dense layers, for the samples of all ranks.",
)
