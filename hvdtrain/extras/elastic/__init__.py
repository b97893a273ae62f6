"""guard.lost: jobs and loops that survive the loss of ranks."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Lets jobs continue without the ranks that die, or end with a checkpoint.",
    implements={"guard.lost": "hvdtrain.extras.elastic.survival"},
)
