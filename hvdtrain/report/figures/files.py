"""Figures as SVG, as PNG, and as files."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
LARGEST_SVG_BYTES = 400_000  # in a page a larger figure is a PNG
# Letters as paths: the page looks the same where the font is missing. No LaTeX, whatever the user's matplotlibrc says.
_SETTINGS: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "hvdtrain", "text.usetex": False}


def save_png(path: Path, draw: Callable[[], Figure], option: str = "--png") -> str:
    """Writes the figure that `draw()` returns; returns a line for people: where it is, or that matplotlib is missing.

    option: that the path was given with. Raises UserError where the file cannot be written.
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
        raise UserError(f"cannot write the picture: {error}", option, "give a file that can be written") from None
    return f"picture: {path}"


def svg(figure: Figure) -> bytes:
    """The figure as SVG, without a date: one run always gives the same bytes."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    return _render(lambda out: FigureCanvasSVG(figure).print_figure(out, format="svg", metadata={"Date": None}))


def png(figure: Figure) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    return _render(lambda out: FigureCanvasAgg(figure).print_figure(out, format="png", dpi=DPI))


def _render(print_to: Callable[[io.BytesIO], None]) -> bytes:
    import matplotlib

    out = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # letters of a run's name that the font lacks: they become boxes
        print_to(out)
    return out.getvalue()


def data_url(svg_data: bytes, png_data: bytes) -> str:
    """A data: URL of the SVG, or of the PNG where the SVG is larger than LARGEST_SVG_BYTES."""
    kind, data = ("svg+xml", svg_data) if len(svg_data) <= LARGEST_SVG_BYTES else ("png", png_data)
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
