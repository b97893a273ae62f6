"""hvdtrain evaluate: the loss and the metrics of a run's model, overall and by class."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Evaluates a run's model on its own or other data: metrics, classes, curves.",
    needs=("trained_models",),
    commands={
        "evaluate": Command(
            "hvdtrain.extras.evaluate.command",
            "hvdtrain evaluate RUN [--split val] [data.root=DIR]      "
            "loss and accuracy of a checkpoint, overall and by class",
            listed_at=300,
            on_ranks=True,
        ),
    },
)
