"""`check`: reports what would go wrong with these ranks, and what to do. Trains nothing."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Finds what would fail on the ranks of a job, and says how to fix it.",
    commands={
        "check": Command(
            "hvdtrain.extras.check.command",
            "mpirun ... hvdtrain check [key=value ...]                "
            "finds what would fail on these ranks, and how to fix it",
            on_ranks=True,
            launched=True,
            listed_at=230,
        ),
    },
)
