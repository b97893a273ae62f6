"""hvdtrain compare: what differs between two runs, and from which step on."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Lists what differs between two runs: keys, environment, and the first step that does.",
    commands={
        "compare": Command(
            "hvdtrain.extras.compare.command",
            "hvdtrain compare RUN RUN [--json [FILE]]                 "
            "what differs: configuration, environment, the first step",
        )
    },
)
