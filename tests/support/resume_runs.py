"""The results of a job in its run folder, and the difference between an interrupted and resumed job
and an uninterrupted one."""

from __future__ import annotations

import functools
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from combinations import MODELS, as_words, model_of, smaller
from pairs import EXAMPLES, assigned, engines_of, joined
from resume_matrix import KINDS, Outcome

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import DONE, REQUEUE
from hvdtrain.training.checkpoint import files
from hvdtrain.training.progress.train_state import Reached, to_json

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
# 36 samples in steps of 11: no epoch ends with a step
ROW = (
    "batch.size=11 epochs=50 stop.steps=12 optim.name=sgd optim.base_lr=0.05 log.every_steps=2 "
    "guard.equal_steps=1 data.ahead=0 checkpoint.keep_last=1"
)
NO_ROW = {  # words of an example -> the tests that resume such a job instead
    "framework=": "the table of frameworks",
    "guard.lost=": "tests of lost ranks, which start MPI with its own options",
    "speed.compile=": "the pairs: a C++ compiler takes most of a minute",
    "model.weights=": "the pairs, which make the file of weights",
    "servers.count=1": "the pairs: without a bound it takes three ranks",
}


@functools.cache
def rows() -> dict[str, str]:
    """Words of each feature's examples whose keys no entry of KINDS has -> a job on two ranks."""
    covered = assigned(" ".join(KINDS.values()))
    return {
        example.words: joined(ROW, MODELS[str(model_of(example.words))], _small(example.words))
        for example in EXAMPLES
        if example.keys - covered.keys() and not _elsewhere(example.words)
    }


def _small(words: str) -> str:
    return as_words(smaller(words))


def _elsewhere(words: str) -> bool:
    return words in NO_ROW or any(words.startswith(start) for start in NO_ROW if start[-1] == "=")


def rows_on(engine: str) -> list[str]:
    """The rows that an engine takes."""
    return [words for words in rows() if engine in engines_of(words)]


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
    for reached in train_state["reached"]:
        reached[Reached._fields.index("seconds")] = 0.0
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
