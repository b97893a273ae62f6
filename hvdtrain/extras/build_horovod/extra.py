"""What the rest of hvdtrain learns of the command horovod."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Builds Horovod for the installed torch and MPI, and verifies it.",
    commands={
        "horovod": Command(
            "hvdtrain.extras.build_horovod.build",
            "hvdtrain horovod [--nccl] [--rebuild]                    "
            "builds Horovod for the torch and the MPI that are installed",
        )
    },
)
