"""What the rest of hvdtrain learns of plan and summary."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Predicts batch, learning rate, memory, time and faults of a job on any number of ranks.",
    commands={
        "plan": Command(
            "hvdtrain.extras.plan.command",
            "hvdtrain plan [--config FILE] [key=value ...]            "
            "what the job would do on 1, 8, 64 and 512 ranks; trains nothing",
            listed_after="  mpirun -np",
        ),
        "summary": Command(
            "hvdtrain.extras.plan.summary",
            "hvdtrain summary [key=value ...]                         "
            "layers of the model: shapes, parameters, operations",
            listed_after="  mpirun ... hvdtrain check",
        ),
    },
)
