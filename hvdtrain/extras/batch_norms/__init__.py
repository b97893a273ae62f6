"""norm.kind=ghost and sync: batch norm over groups of samples, or over the samples of all ranks."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Computes batch norm over groups of samples (ghost), or over the samples of all ranks.",
    implements={
        "norm.kind=ghost": "hvdtrain.extras.batch_norms.use_norm",
        "norm.kind=sync": "hvdtrain.extras.batch_norms.use_norm",
    },
)
