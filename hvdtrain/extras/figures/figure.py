"""Figures of commands and labs: colours, axes, and output as PNG."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish, and dashes, because lines may
# cover each other.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 2)), (0, (1, 1.2)), (0, (6, 2, 1, 2)))
GREY = "#777777"
# inches; small, so that letters stay readable on a narrow screen
WIDTH = 5.6
HEIGHT = 3.4
LineStyle = dict[str, Any]  # keyword arguments of matplotlib's Axes.plot
DPI = 150  # of a PNG


def new_figure(
    rows: int = 1, columns: int = 1, height: float = HEIGHT, width: float = WIDTH, **shared: Any
) -> tuple[Figure, list[Axes]]:
    """Creates an empty figure of this size in inches, and its axes row by row. shared: further
    arguments of Figure.subplots.

    It avoids pyplot, which looks for a display and keeps every figure.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    all_axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for axes in all_axes:
        axes.grid(color="#DDDDDD", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=9)
    return figure, all_axes


def run_style(index: int) -> LineStyle:
    """Returns colour and dashes of the run with this index."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": DASHES[index % len(DASHES)]}


def literal(label: str) -> str:
    """Returns a label that matplotlib shows unchanged: no formula between dollars, no leading
    underscore, which a legend would skip."""
    return (" " if label.startswith("_") else "") + label.replace("$", r"\$")


def drawn_values(axes: Axes) -> list[float]:
    """Returns all y values of the drawn lines."""
    lines: list[Any] = [line.get_ydata() for line in axes.lines]
    return [float(value) for values in lines for value in values]


def integer_ticks(*sides: Axis) -> None:
    """Ticks at whole numbers only, of axes.xaxis or axes.yaxis."""
    from matplotlib.ticker import MaxNLocator

    for side in sides:
        side.set_major_locator(MaxNLocator(integer=True))


def log_scale(axes: Axes) -> None:
    """Sets a logarithmic y axis with plain numbers, also between powers of ten if there are few of
    them."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    values = drawn_values(axes)
    few_powers = max(values) < 100 * min(values)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axes.yaxis.set_minor_formatter("{x:,g}" if few_powers else NullFormatter())
    axes.tick_params(which="minor", labelsize=9)


# Letters are paths, so the page looks the same without the font. LaTeX is off, whatever the user's
# matplotlibrc says.
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "hvdtrain",
    "text.usetex": False,
}


def save_png(path: Path, draw: Callable[[], Figure], option: str = "--png") -> str:
    """Writes the figure that `draw()` returns; returns a line that reports its path, or that
    matplotlib is missing.

    option: the option with the path. Raises UserError if the file cannot be written.
    """
    try:
        data = png(draw())
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return "no picture: matplotlib is not installed; pip install matplotlib"
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UserError(
            f"cannot write the picture: {error}", option, "give a file that can be written"
        ) from None
    return f"picture: {path}"


def png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return render(lambda out: FigureCanvasAgg(figure).print_figure(out, format="png", dpi=DPI))


def render(print_to: Callable[[io.BytesIO], None]) -> bytes:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # letters in a run's name that the font lacks become boxes
        warnings.simplefilter("ignore", UserWarning)
        print_to(out)
    return out.getvalue()
