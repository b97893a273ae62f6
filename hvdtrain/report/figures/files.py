"""Figures as bytes, and as a file."""

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
MOST_SVG_BYTES = 400_000  # in a page a larger figure is a PNG
# Letters as paths: the page looks alike where the font is missing. No LaTeX, whatever the user's matplotlibrc says.
_SETTINGS: dict[Any, Any] = {"svg.fonttype": "path", "svg.hashsalt": "hvdtrain", "text.usetex": False}


def save(path: Path, draw: Callable[[], Figure]) -> str:
    """Writes a PNG, and gives the line that says so, or that says why there is none."""
    try:
        picture = png(draw())
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        return "no picture: matplotlib is not installed; pip install 'hvdtrain[plot]'"
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise UserError(f"cannot write the picture: {error}", "--png", "give a file that can be written") from None
    return f"picture: {path}"


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
