"""hvdtrain sample and log.samples: images or text that a language model draws."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Draws images or text with a language model, during training and afterwards.",
    needs=("tokenizer_folders", "trained_models"),
    implements={"log.samples": "hvdtrain.extras.sample.sequences"},
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
