"""python -m hvdtrain report: what became of one run or of several, as a page and pictures."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hvdtrain.config.read import nearest
from hvdtrain.config.yaml_reader import short
from hvdtrain.errors import DONE, UserError
from hvdtrain.report import summary
from hvdtrain.report.figures import draw, files
from hvdtrain.report.page import Image, page
from hvdtrain.report.run import read_record

USAGE = """\
python -m hvdtrain report RUN [RUN ...] [--to FOLDER]
  RUN    a run folder, which has events.jsonl: of a job that is over, that goes on, or that was killed; several are compared
  --to   the folder for report.html, one file that needs nothing else, and report-*.png;
         where left out RUN itself, and ./report for several"""
_CALL = USAGE.partition("\n")[0]
_WHERE = "command line of report"
PATIENCE_S = 2.0  # before a line says how far it is


def report(words: Sequence[str]) -> int:
    """The command behind `report`; returns the exit code."""
    if not words or {"-h", "--help"} & set(words):
        print(USAGE)
        return DONE
    runs, to = _parse(words)
    records = [read_record(run) for run in runs]
    _make(to)
    labels = summary.labels(records)
    progress = _Progress()
    pictures = draw.draw(records, labels, progress)
    images, pngs = [], {}
    for place, picture in enumerate(pictures, 1):
        progress(f"writing: {place} of {len(pictures)}")
        pngs[f"report-{picture.name}.png"] = png = files.png(picture.figure)
        images.append(Image(picture.title, picture.about, files.address(files.svg(picture.figure), png)))
    html = page(records, labels, images, shlex.join(["python", "-m", "hvdtrain", "report", *words]))
    _write(to, {"report.html": html.encode("utf-8", "replace")} | pngs)
    print(f"page: {to / 'report.html'}")
    print(f"pictures: {len(pngs)} in {to}")
    return DONE


class _Progress:
    """A line on the standard error from time to time, for those who wait."""

    def __init__(self) -> None:
        self._spoken = time.monotonic()

    def __call__(self, words: str) -> None:
        if time.monotonic() - self._spoken >= PATIENCE_S:
            self._spoken = time.monotonic()
            print(words, file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, _WHERE, _CALL)


def _parse(words: Sequence[str]) -> tuple[list[Path], Path]:
    """The run folders, each once, and where to write."""
    parser = _Parser(prog="python -m hvdtrain report", add_help=False, allow_abbrev=False)
    parser.add_argument("runs", nargs="*")
    parser.add_argument("--to")
    asked, rest = parser.parse_known_intermixed_args(words)
    if rest:
        raise UserError(f"cannot read the word '{short(rest[0])}'", _WHERE, f"{nearest(rest[0].partition('=')[0], ['--to'])}; {_CALL}")
    if not asked.runs:
        raise UserError("RUN is missing", _WHERE, _CALL)
    runs = list({os.path.realpath(run): run for run in map(_path, asked.runs)}.values())
    return runs, _path(asked.to) if asked.to else runs[0] if len(runs) == 1 else Path("report")


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))


def _make(folder: Path) -> None:
    """Before seconds are spent on drawing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _cannot(folder, error) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _cannot(folder, PermissionError(0, "permission denied"))


def _write(to: Path, files: dict[str, bytes]) -> None:
    """Each whole or not there; the pictures of an earlier report that have nothing to show any more are removed."""
    for path in (to / f"report-{name}.png" for name, *_ in draw.ALL if f"report-{name}.png" not in files):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise _cannot(path, error) from None
    for name, data in files.items():
        unfinished = to / f".{name}.{os.getpid()}.unfinished"
        try:
            unfinished.write_bytes(data)
            unfinished.replace(to / name)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise _cannot(to / name, error) from None


def _cannot(path: Path, error: OSError) -> UserError:
    return UserError(f"cannot write {path}: {error.strerror or error}", "--to", "give a folder that can be written, with room")
