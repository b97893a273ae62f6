"""hvdtrain predict: the outputs of a run's model for files of images and numbers."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="stable",
    says="Writes tables, masks and maps of a run's model for files of images and numbers.",
    needs=(
        "image_files",
        "trained_models",
    ),
    commands={
        "predict": Command(
            "hvdtrain.extras.predict.command",
            "hvdtrain predict RUN --data FILE --to FILE.csv           "
            "the outputs of a run's model for tables, arrays, tokens; --images DIR",
            listed_at=400,
            on_ranks=True,
        ),
    },
)
