"""How long a job takes to start, and how long it will take."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Reports how long a job takes to start, and estimates its duration if steps are slow.",
    gauges=("hvdtrain.extras.startup.gauge:startup_gauge",),
)
