"""PowerSGD: gradients are reduced as products of two thin matrices."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="experimental",
    says="Reduces gradients as matrices of low rank (PowerSGD), which have fewer bytes.",
)
