"""hvdtrain report: one run, or several side by side, as an HTML page and pictures."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.config.read import expand
from hvdtrain.core.folder import Folder
from hvdtrain.core.process import command_line, print_stderr
from hvdtrain.errors import DONE, UserError, nearest, short
from hvdtrain.extras.figures.figure import png
from hvdtrain.extras.report.figures import canvas, draw
from hvdtrain.extras.report.measures.groups import run_labels
from hvdtrain.extras.report.page import PageImage, render_page
from hvdtrain.records.run import read_run

USAGE = """\
hvdtrain report RUN [RUN ...] [--to FOLDER]
  RUN    a run folder, which has events.jsonl: of a job that is done, that is running, or that was killed; several are compared
  --to   the folder for report.html, one file that needs no other, and report-*.png;
         default: RUN itself for one run, ./report for several"""  # noqa: E501
_SYNTAX = USAGE.partition("\n")[0]
_COMMAND_LINE = "command line of report"
PROGRESS_S = 2.0  # between two lines of progress


class _Options(NamedTuple):
    runs: list[Path]  # each run folder once
    to: Path  # the folder for the page and the pictures


def report(arguments: Sequence[str]) -> int:
    """Runs `report`; returns the exit code. Raises UserError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return DONE
    options = _parse(arguments)
    runs = [read_run(folder) for folder in options.runs]
    _make_folder(options.to)  # before seconds are spent on drawing
    labels = run_labels(runs)
    progress = ProgressPrinter()
    images: list[PageImage] = []
    pictures: dict[str, bytes] = {}  # file name -> PNG
    drawn = draw.draw_all(runs, labels, progress)
    for number, (kind, figure) in enumerate(drawn, start=1):
        progress(f"writing: {number} of {len(drawn)}")
        picture = png(figure)
        pictures[_picture_name(kind)] = picture
        url = canvas.data_url(canvas.svg(figure), picture)
        images.append(PageImage(kind.title, kind.description, url))
    command = command_line("report", *arguments)
    html = render_page(runs, labels, images, command)
    _remove_old_pictures(options.to, keep=set(pictures))
    for name, data in {"report.html": html.encode("utf-8", "replace"), **pictures}.items():
        _write_whole(options.to, name, data)
    print(f"page: {options.to / 'report.html'}")
    print(f"pictures: {len(pictures)} in {options.to}")
    return DONE


class ProgressPrinter:
    """Prints a line to the standard error if PROGRESS_S have passed since the last one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_s = clock()

    def __call__(self, line: str) -> None:
        if self._clock() - self._last_s >= PROGRESS_S:
            self._last_s = self._clock()
            print_stderr(line)


def _parse(arguments: Sequence[str]) -> _Options:
    """Parses the command line. Raises UserError if it does not match USAGE."""
    parser = CommandParser("report", _SYNTAX)
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--to")
    parsed, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        is_folder = os.path.isdir(unknown[0])  # a folder whose name begins with -
        suggestion = (
            f"write ./{short(unknown[0])}"
            if is_folder
            else nearest(unknown[0].partition("=")[0], ["--to"])
        )
        raise UserError(
            f"unknown argument '{short(unknown[0])}'", _COMMAND_LINE, f"{suggestion}; {_SYNTAX}"
        )
    if not parsed.runs:
        raise UserError("RUN is missing", _COMMAND_LINE, _SYNTAX)
    folders = [expand(run, "RUN") for run in parsed.runs]
    runs = list({os.path.realpath(folder): folder for folder in folders}.values())
    if parsed.to:
        return _Options(runs, expand(parsed.to, "--to"))
    return _Options(runs, runs[0] if len(runs) == 1 else Path("report"))


def _make_folder(folder: Path) -> None:
    """Raises UserError if it cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot_write(folder, error) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _cannot_write(folder, PermissionError(0, "permission denied"))


def _picture_name(kind: draw.FigureKind) -> str:
    return f"report-{kind.name}.png"


def _remove_old_pictures(folder: Path, keep: set[str]) -> None:
    """Deletes pictures of an earlier report that are not part of this one; other files are kept."""
    for name in {_picture_name(kind) for kind in draw.KINDS} - keep:
        try:
            with Folder.open(folder) as opened, contextlib.suppress(FileNotFoundError):
                opened.remove(name)
        except OSError as error:
            raise _cannot_write(folder / name, error) from None


def _write_whole(folder: Path, name: str, data: bytes) -> None:
    """Writes the file, or raises UserError and leaves it unchanged. A link with its name is
    replaced, not followed."""
    try:
        with Folder.open(folder) as opened:
            opened.replace(name, data)
    except OSError as error:
        raise _cannot_write(folder / name, error) from None


def _cannot_write(path: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {path}: {error.strerror or error}",
        "--to",
        "give a folder that can be written and has room",
    )
