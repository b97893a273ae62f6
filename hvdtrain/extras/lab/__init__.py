"""hvdtrain lab: the experiments of the course in labs/."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Runs an experiment of the course in labs/.",
    needs=("figures", "launch"),
    commands={
        "lab": Command(
            "hvdtrain.extras.lab.command",
            "hvdtrain lab [N] [--quick | --notebook FILE.ipynb]       "
            "an experiment of the course in labs/",
        )
    },
)
