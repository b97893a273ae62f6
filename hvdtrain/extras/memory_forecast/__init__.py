"""The memory of a job's ranks, counted in steps on tensors without data before the job starts."""

from hvdtrain.core.extras import Extra

EXTRA = Extra(
    status="stable",
    says="Predicts the memory of a job's ranks, for its header, for plan and for batch.micro=auto.",
    implements={"batch.micro=auto": "hvdtrain.extras.memory_forecast.predict"},
)
