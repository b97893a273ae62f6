"""The registration of log.trust_ratios as an extra."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Records by which factor LARS, LARC and LAMB multiply each layer's learning rate.",
)
