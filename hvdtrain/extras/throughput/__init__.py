"""What each device of a job achieves: samples, tokens and operations a second, and MFU."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Reports what each device achieves: samples, tokens and operations a second, and MFU.",
    implements={
        "speed.peak_tflops": "hvdtrain.extras.throughput.device_throughput",
    },
    throughput="hvdtrain.extras.throughput.device_throughput:measure_throughput",
)
