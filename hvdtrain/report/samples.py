"""What a run drew at its evaluations (log.samples): the pictures or texts of its folder, in the order of the steps."""

from __future__ import annotations

import base64
import re
from typing import NamedTuple

from hvdtrain.core.folder import Folder
from hvdtrain.report.objective import objective_of
from hvdtrain.report.run import RunRecord, number

MOST_SHOWN = 12  # steps; of more the first, the last and some between
MOST_BYTES = 2**22  # of a file
_NAME = re.compile(r"step-(\d{8,15})\.(png|txt)")
_PNG = b"\x89PNG\r\n\x1a\n"


class Drawn(NamedTuple):
    """One row of the page; of `url` and `text` one is empty."""

    title: str  # "step 120: val loss 1.273"
    url: str  # data:image/png
    text: str


def read_samples(run: RunRecord) -> list[Drawn]:
    """A file that is no picture or text, or cannot be read, is left out: the report shows the rest."""
    try:
        with Folder.open(run.folder, "samples") as folder:
            found = sorted((int(match[1]), name) for name in folder.names() if (match := _NAME.fullmatch(name)))
            shown = [_read(folder, name, _title(run, step)) for step, name in evenly(found, MOST_SHOWN)]
    except OSError:
        return []
    return [drawn for drawn in shown if drawn]


def evenly(items: list[tuple[int, str]], most: int) -> list[tuple[int, str]]:
    """At most so many of them, with the first and the last."""
    if len(items) <= most:
        return items
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _title(run: RunRecord, step: int) -> str:
    objective = objective_of(run)
    value = next((number(event, f"val_{objective.name}") for event in run.epoch_events() if event["step"] == step), None)
    shown = "" if value is None else objective.shown(value)
    return f"step {step:,}" + (f": validation {objective.name} {shown}" if shown else "")


def _read(folder: Folder, name: str, title: str) -> Drawn | None:
    try:
        data = folder.read(name, MOST_BYTES)
    except (OSError, ValueError):
        return None
    if name.endswith(".txt"):
        return Drawn(title, "", data.decode(errors="replace"))
    return Drawn(title, f"data:image/png;base64,{base64.b64encode(data).decode()}", "") if data.startswith(_PNG) else None
