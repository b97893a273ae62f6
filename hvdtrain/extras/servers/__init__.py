"""Parameter servers: ranks that hold the weights and update them, and ranks that compute gradients
and do not wait for each other; hvdtrain replay recomputes their updates."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Trains with parameter servers, so that workers do not wait for each other.",
    commands={
        "replay": Command(
            "hvdtrain.extras.servers.replay",
            "hvdtrain replay RUN                                      "
            "makes the updates of a run with servers.log=true again, and compares",
        )
    },
)
