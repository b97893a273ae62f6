"""hvdtrain drill: kills or pauses ranks of a running job, and measures how it recovers."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Kills or pauses ranks of your own running job, and measures how it recovers.",
    commands={
        "drill": Command(
            "hvdtrain.extras.drill.command",
            "hvdtrain drill RUN [--kill rank|host|random]             "
            "kill or pause ranks of your own running job, to see that it lives",
        )
    },
)
