"""`plan` and `summary`: what a job would do on several numbers of ranks, without training."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Predicts batch, learning rate, memory, time and faults of a job on any number of ranks.",
    needs=("figures", "memory_forecast"),
    commands={
        "plan": Command(
            "hvdtrain.extras.plan.command",
            "hvdtrain plan [--config FILE] [key=value ...]            "
            "shows the job on 1, 8, 64 and 512 ranks, without training",
            listed_at=210,
        ),
        "summary": Command(
            "hvdtrain.extras.plan.summary",
            "hvdtrain summary [key=value ...]                         "
            "layers of the model: shapes, parameters, operations",
            listed_at=240,
        ),
    },
)
