"""Energy, power and utilization of the hardware that a job uses."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Measures the energy and power of GPUs and processors, and the utilization of GPUs.",
    gauges=("hvdtrain.extras.energy.gauge:energy_gauge",),
)
