"""data.stage: copies the data to the local disk of each node."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Copies the data to each node's local disk before training.",
    implements={"data.stage": "hvdtrain.extras.staging.staged"},
)
