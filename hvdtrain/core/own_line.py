"""Finds the line of the user's code that an exception came from, not a line of a library, of Python
or of hvdtrain."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

_OTHERS = (
    f"{Path(__file__).parents[1]}/",
    *(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)

# also if PYTHONPATH or a cluster's module contains them
_INSTALLED = (
    "/site-packages/",
    "/dist-packages/",
)
_MADE = ("<frozen", "<string")  # by Python itself, as of a dataclass
_COMPILED = (".pyx", ".pxi", ".pyx.in")  # of Cython, by a path of where it was compiled


def own_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame of the user's code, in the exception or the one it was raised from; None
    if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(frame.filename)]
    if own:
        return own[-1]
    return None if error.__cause__ is None else own_frame(error.__cause__)


def own_line(error: BaseException) -> str:
    """file:line: its text; the library's line if no line is the user's."""
    frame = own_frame(error) or (traceback.extract_tb(error.__traceback__) or [None])[-1]
    return "" if frame is None else f"{frame.filename}:{frame.lineno}: {frame.line}"


def without_frames_of_hvdtrain(error: BaseException) -> str:
    """The traceback of an exception of the user's code, from that code on."""
    trace = traceback.TracebackException.from_exception(error)
    trace.stack = traceback.StackSummary.from_list(
        [frame for frame in trace.stack if not frame.filename.startswith(_OTHERS[0])]
    )
    return "".join(trace.format()).rstrip()


def _is_own(path: str) -> bool:
    is_installed = any(folder in path for folder in _INSTALLED)
    return (
        not is_installed
        and not path.startswith((*_OTHERS, *_MADE))
        and not path.endswith(_COMPILED)
    )
