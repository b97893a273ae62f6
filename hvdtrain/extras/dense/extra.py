"""What the rest of hvdtrain learns of parallel.dense."""

from hvdtrain.config.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Each rank has some of the neurons of the dense layers, for the samples of all ranks.",
)
