"""The loss around trained weights, and between two runs; how sharp its minima are."""

from hvdtrain.core.extras import Command, Extra

EXTRA = Extra(
    status="experimental",
    says="Measures the loss around a run's weights, and on the line to those of another run.",
    needs=("figures", "trained_models"),
    commands={
        "landscape": Command(
            "hvdtrain.extras.landscape.command",
            "hvdtrain landscape RUN [RUN]                             "
            "the loss around a run's weights: how sharp its minimum is",
            on_ranks=True,
        ),
    },
)
