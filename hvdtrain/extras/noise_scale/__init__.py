"""The gradient noise scale, up to which larger batches save steps."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Measures the gradient noise scale, up to which larger batches save steps.",
    implements={"log.noise_scale": "hvdtrain.extras.noise_scale.scale"},
)
