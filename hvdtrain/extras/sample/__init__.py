"""hvdtrain sample: draws images or text with the model of a run."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Draws images or text with a trained language model.",
    commands={
        "sample": Command(
            "hvdtrain.extras.sample.command",
            "hvdtrain sample RUN --png FILE.png                       "
            "images or text drawn from a model with task.name=language",
            listed_at=410,
            on_ranks=True,
        ),
    },
)
