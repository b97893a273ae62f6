"""Samples that are drawn by weight."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Draws training samples by weights, or all classes equally often.",
    implements={
        "data.sample_weights": "hvdtrain.extras.sample_weights.weights",
    },
)
