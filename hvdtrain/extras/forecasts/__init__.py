"""Targets that are samples some steps later."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Trains on pairs of a sample and one some steps later, as for forecasts.",
    implements={
        "data.shift": "hvdtrain.extras.forecasts.shifted",
    },
)
