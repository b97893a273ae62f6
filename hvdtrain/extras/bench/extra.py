"""What the rest of hvdtrain learns of bench and lr-find."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Measures steps, allreduces, data loading and scaling, and proposes a learning rate.",
    commands={
        "lr-find": Command(
            "hvdtrain.extras.bench.lr_find",
            "hvdtrain lr-find [--png FILE] [key=value ...]            "
            "a curve of the loss over learning rates, and a proposal",
            listed_after="  mpirun ... hvdtrain check",
            on_ranks=True,
        ),
        "bench": Command(
            "hvdtrain.extras.bench.command",
            "hvdtrain bench step|data|allreduce [...]                 "
            "images/s, phases of a step, speed of reading; of sums under mpirun",
            listed_after="  hvdtrain lr-find",
            on_ranks=True,
        ),
    },
)
