"""The registration of PowerSGD as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="experimental",
    says="Reduces gradients as matrices of low rank (PowerSGD), which have fewer bytes.",
)
