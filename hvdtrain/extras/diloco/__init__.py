"""DiLoCo: local steps whose mean difference is a step of an outer optimizer."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="experimental",
    says="Gives local steps an outer optimizer (DiLoCo), and sends their differences in parts or "
    "in 16 bits.",
)
