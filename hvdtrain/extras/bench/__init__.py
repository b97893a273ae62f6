"""`bench`: measures the parts of a job on this machine; `lr-find`."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Measures steps, allreduces, data loading and scaling, and proposes a learning rate.",
    needs=("figures", "launch", "plan"),
    commands={
        "lr-find": Command(
            "hvdtrain.extras.bench.lr_find",
            "hvdtrain lr-find [--png FILE] [key=value ...]            "
            "the loss over learning rates, and a proposed rate",
            listed_at=250,
            on_ranks=True,
        ),
        "bench": Command(
            "hvdtrain.extras.bench.command",
            "hvdtrain bench step|data|allreduce [...]                 "
            "speed of steps and their phases, reading, allreduce (under mpirun)",
            listed_at=260,
            on_ranks=True,
        ),
    },
)
