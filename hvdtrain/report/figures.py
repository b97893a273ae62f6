"""All figures of a report in their order, as SVG and as PNG."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hvdtrain.report import figures_ranks, figures_speed, figures_training
from hvdtrain.report.figures_look import new
from hvdtrain.report.record import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
MOST_SVG_BYTES = 400_000  # in a page a larger figure is a PNG
# Letters as paths: the page looks alike where the font is missing. No LaTeX, whatever the user's matplotlibrc says.
_SETTINGS: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "hvdtrain", "text.usetex": False}
_Draw = Callable[[Sequence[Record], Sequence[str]], "Figure | None"]


class Picture(NamedTuple):
    """A figure with something in it."""

    name: str  # of its file: report-NAME.png
    title: str
    about: str  # what it shows: a sentence for those who do not see it too
    figure: Figure


ALL: tuple[tuple[str, str, str, _Draw], ...] = (
    ("loss", "Loss", "Training and validation loss over the epochs.", figures_training.loss),
    ("accuracy", "Accuracy", "Training and validation accuracy over the epochs, with the targets.", figures_training.accuracy),
    ("rates", "Learning rate and batch", "Learning rate and global batch over the epochs.", figures_training.rates),
    ("throughput", "Throughput", "Training images a second over the time of the job.", figures_speed.throughput),
    ("phases", "Where a step's time goes", "Milliseconds of a step; communication is waiting for gradients.", figures_speed.phases),
    ("ranks", "Ranks", "Each rank's own work in a step, without communication, and the slowest rank.", figures_ranks.own_work),
    ("scaling", "More ranks", "Speed-up, efficiency and energy against the fewest ranks.", figures_ranks.scaling),
    ("noise", "Noise scale", "The gradient noise scale: batches far above it save few steps.", figures_training.noise_scale),
    ("memory", "Memory", "Memory of the largest rank over the time of the job.", figures_speed.memory),
    ("power", "Power and energy", "Watts over the time of the job, and joules per image of each epoch.", figures_speed.power),
)  # fmt: skip


def draw(records: Sequence[Record], labels: Sequence[str], tell: Callable[[str], None] = lambda _: None) -> list[Picture]:
    """Those that have something to show. `tell` hears how far it is. Raises UserError where matplotlib is missing."""
    new()
    pictures: list[Picture] = []
    for place, (name, title, about, function) in enumerate(ALL, 1):
        tell(f"drawing: {place} of {len(ALL)}")
        if figure := function(records, labels):
            pictures.append(Picture(name, title, about, figure))
    return pictures


def svg(figure: Figure) -> bytes:
    """The same bytes for the same run."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    return _written(lambda out: FigureCanvasSVG(figure).print_figure(out, format="svg", metadata={"Date": None}))


def png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return _written(lambda out: FigureCanvasAgg(figure).print_figure(out, format="png", dpi=DPI))


def _written(write: Callable[[io.BytesIO], None]) -> bytes:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a run named in letters that the font has not: they become boxes
        write(out)
    return out.getvalue()


def address(picture: bytes, rendered_png: bytes) -> str:
    """A data: address of the SVG, or of the PNG where that is much smaller."""
    kind, data = ("svg+xml", picture) if len(picture) <= MOST_SVG_BYTES else ("png", rendered_png)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
