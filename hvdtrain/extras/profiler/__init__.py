"""Traces of single steps by the framework's profiler."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Records a trace of some steps on every rank, by the profiler of torch or JAX.",
    implements={
        "profile.steps": "hvdtrain.extras.profiler.step_profiler",
    },
)
