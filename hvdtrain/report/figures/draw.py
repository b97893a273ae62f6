"""All figures of a report, in their order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.errors import UserError
from hvdtrain.report.figures import ranks, speed, training
from hvdtrain.report.figures.canvas import new_figure
from hvdtrain.report.run import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Draw = Callable[[Sequence[RunRecord], Sequence[str]], "Figure | None"]  # of runs and their labels; None where there is nothing to show


class FigureKind(NamedTuple):
    name: str  # of its file: report-NAME.png
    title: str
    description: str  # one sentence; the alternative text too
    draw: _Draw


class DrawnFigure(NamedTuple):
    kind: FigureKind
    figure: Figure


KINDS = (
    FigureKind("loss", "Loss", "Training and validation loss over the epochs.", training.loss),
    FigureKind("accuracy", "Accuracy", "Training and validation accuracy over the epochs, with the targets.", training.accuracy),
    FigureKind("metrics", "Metrics", "The other metrics of training and validation over the epochs, with the targets.", training.metrics),
    FigureKind("logged", "Logged by the script", "What a script with a loop of its own has logged, over the epochs.", training.logged),
    FigureKind("confusion", "What each class is taken for", "Percent of each class's samples, in the last evaluation.", training.confusion),
    FigureKind("rates", "Learning rate and batch", "Learning rate and global batch over the epochs.", training.rates),
    FigureKind("throughput", "Throughput", "Training samples per second over the time of the job.", speed.throughput),
    FigureKind("phases", "Time of a step", "Milliseconds of a step by phase; communication is waiting for gradients.", speed.phases),
    FigureKind("ranks", "Ranks", "Each rank's own work in a step, without communication, and the slowest rank.", ranks.own_work),
    FigureKind(
        "mesh", "Time of each rank", "Milliseconds of a step: computing, waiting for other stages, communication.", ranks.time_of_ranks
    ),
    FigureKind("pipeline", "Passes of a pipeline", "One step over time, numbered by micro-batch; gaps are waiting.", ranks.timeline),
    FigureKind("scaling", "More ranks", "Speed-up, efficiency and energy relative to the fewest ranks.", ranks.scaling),
    FigureKind("noise", "Noise scale", "The gradient noise scale: batches far above it save few steps.", training.noise_scale),
    FigureKind("memory", "Memory", "Memory of the largest rank over the time of the job.", speed.memory),
    FigureKind("power", "Power and energy", "Watts over the time of the job, and joules per image of each epoch.", speed.power),
)


def draw_all(runs: Sequence[RunRecord], labels: Sequence[str], progress: Callable[[str], None] = lambda _: None) -> list[DrawnFigure]:
    """The figures that have something to show. `progress` receives a line before each. Raises UserError where matplotlib is missing."""
    try:
        new_figure()
    except ModuleNotFoundError:
        raise UserError("matplotlib is not installed", "report", "pip install matplotlib") from None
    drawn: list[DrawnFigure] = []
    for number, kind in enumerate(KINDS, start=1):
        progress(f"drawing: {number} of {len(KINDS)}")
        figure = kind.draw(runs, labels)
        if figure:
            drawn.append(DrawnFigure(kind, figure))
    return drawn
