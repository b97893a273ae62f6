"""What the rest of hvdtrain learns of the command replay."""

from hvdtrain.config.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Makes the updates of a run with servers.log=true again, and compares bit by bit.",
    commands={
        "replay": Command(
            "hvdtrain.extras.replay.command",
            "hvdtrain replay RUN                                      "
            "makes the updates of a run with servers.log=true again, and compares",
        )
    },
)
