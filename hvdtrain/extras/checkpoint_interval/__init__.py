"""The cheapest time between two checkpoints."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Chooses the time between checkpoints by their cost and the rate of faults.",
    implements={
        "checkpoint.every": "hvdtrain.extras.checkpoint_interval.auto_interval",
    },
)
