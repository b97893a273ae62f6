"""hvdtrain sweep: runs many jobs that differ in some keys, several at a time, and shows which is
best."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Trains with many settings side by side, and reports the best.",
    needs=("figures", "launch"),
    commands={
        "sweep": Command(
            "hvdtrain.extras.sweep.command",
            "hvdtrain sweep --grid KEY=A,B [--at-once 2] --out DIR    "
            "trains with many settings: a table and a figure",
            trains=True,
        )
    },
)
