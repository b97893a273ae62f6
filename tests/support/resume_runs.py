"""The results of a job in its run folder, and the difference between an interrupted and resumed job
and an uninterrupted one."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from resume_matrix import Outcome

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import DONE, REQUEUE
from hvdtrain.training.checkpoint import files
from hvdtrain.training.progress.train_state import to_json

# of events; no times
FIELDS = (
    "loss",
    "lr",
    "batch",
    "noise_scale",
    "train_loss",
    "val_loss",
    "val_accuracy",
    "val_count",
)
ROOM = 2**22


class Run(NamedTuple):
    """What a job left."""

    code: int
    rows: list[list[int]]  # the training samples that each rank read, in order
    arrays: Arrays
    train_state: dict[str, Any]
    events: dict[tuple[str, int], dict[str, float]]  # (kind, step) -> FIELDS


class Cell(NamedTuple):
    """One interruption: the job without it, up to it, and after it."""

    straight: Run
    stopped: Run
    resumed: Run


def read_run(folder: Path, outcome: Outcome) -> Run:
    newest = files.finished(folder)[-1]
    train_state = to_json(files.read_numbers(newest).train_state)
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    events = {
        (e["kind"], e["step"]): {key: e[key] for key in FIELDS if key in e}
        for e in lines
        if e["kind"] in ("step", "epoch")
    }
    train_state = {
        key: value
        for key, value in train_state.items()
        if key not in ("seconds", "epoch_s", "trained_s", "evaluated_s")
    }
    return Run(outcome.code, outcome.rows, files.read_arrays(newest, ROOM), train_state, events)


def difference(cell: Cell) -> float:
    """The largest over all arrays, relative to the largest number of each, and over all numbers of
    events, relative to each."""
    straight, stopped, resumed = cell
    assert (straight.code, stopped.code, resumed.code) == (DONE, REQUEUE, DONE)
    assert Counter([*stopped.events, *resumed.events]) == Counter([*straight.events]), (
        "each step and epoch has one event"
    )
    assert straight.arrays.keys() == resumed.arrays.keys()
    pairs: list[tuple[Any, Any]] = [
        (straight.arrays[name], array) for name, array in resumed.arrays.items()
    ]
    pairs += [
        (straight.events[key][name], number)
        for key, numbers in resumed.events.items()
        for name, number in numbers.items()
    ]
    return float(np.max([_relative(np.array(a, float), np.array(b, float)) for a, b in pairs]))


def _relative(a: np.ndarray, b: np.ndarray) -> float:
    return (
        0.0
        if np.array_equal(a, b, equal_nan=True)
        else float(np.abs(a - b).max() / (np.abs(a).max() or 1.0))
    )


def check_same(cell: Cell) -> None:
    """To the last bit, and each rank reads what it would have read."""
    straight, stopped, resumed = cell
    assert difference(cell) == 0
    assert _bits(straight.arrays) == _bits(resumed.arrays)
    assert straight.train_state == resumed.train_state
    assert [
        before + after for before, after in zip(stopped.rows, resumed.rows, strict=True)
    ] == straight.rows


def _bits(arrays: Arrays) -> dict[str, tuple[np.dtype, tuple[int, ...], bytes]]:
    return {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}


def reads_the_rest(cell: Cell) -> bool:
    """Whether all ranks together read what they had not read when they were stopped: no sample
    twice, none left out."""
    straight, stopped, resumed = (Counter(itertools.chain(*run.rows)) for run in cell)
    return stopped + resumed == straight
