"""hvdtrain horovod: builds Horovod for the installed torch and MPI, installs and
verifies it."""

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
