"""All figures of a report in their order, as SVG and as PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.errors import UserError
from hvdtrain.report.figures import ranks, speed, training
from hvdtrain.report.figures.style import new
from hvdtrain.report.run import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_Draw = Callable[[Sequence[Record], Sequence[str]], "Figure | None"]


class Picture(NamedTuple):
    """A figure with something in it."""

    name: str  # of its file: report-NAME.png
    title: str
    about: str  # what it shows: a sentence for those who do not see it too
    figure: Figure


ALL: tuple[tuple[str, str, str, _Draw], ...] = (
    ("loss", "Loss", "Training and validation loss over the epochs.", training.loss),
    ("accuracy", "Accuracy", "Training and validation accuracy over the epochs, with the targets.", training.accuracy),
    ("rates", "Learning rate and batch", "Learning rate and global batch over the epochs.", training.rates),
    ("throughput", "Throughput", "Training images a second over the time of the job.", speed.throughput),
    ("phases", "Where a step's time goes", "Milliseconds of a step; communication is waiting for gradients.", speed.phases),
    ("ranks", "Ranks", "Each rank's own work in a step, without communication, and the slowest rank.", ranks.own_work),
    ("scaling", "More ranks", "Speed-up, efficiency and energy against the fewest ranks.", ranks.scaling),
    ("noise", "Noise scale", "The gradient noise scale: batches far above it save few steps.", training.noise_scale),
    ("memory", "Memory", "Memory of the largest rank over the time of the job.", speed.memory),
    ("power", "Power and energy", "Watts over the time of the job, and joules per image of each epoch.", speed.power),
)  # fmt: skip


def draw(records: Sequence[Record], labels: Sequence[str], tell: Callable[[str], None] = lambda _: None) -> list[Picture]:
    """Those that have something to show. `tell` hears how far it is. Raises UserError where matplotlib is missing."""
    try:
        new()
    except ModuleNotFoundError:
        raise UserError("matplotlib is not installed", "report", "pip install 'hvdtrain[report]'") from None
    pictures: list[Picture] = []
    for place, (name, title, about, function) in enumerate(ALL, 1):
        tell(f"drawing: {place} of {len(ALL)}")
        if figure := function(records, labels):
            pictures.append(Picture(name, title, about, figure))
    return pictures
