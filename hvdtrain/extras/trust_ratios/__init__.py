"""Trust ratios of layers over time, as LARS, LARC and LAMB compute them."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Records by which factor LARS, LARC and LAMB multiply each layer's learning rate.",
)
