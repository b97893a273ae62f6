"""Tasks whose model is called with several fields of a sample."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains models that are called with several fields of a sample.",
    implements={
        "data.inputs": "hvdtrain.extras.several_inputs.task",
    },
)
