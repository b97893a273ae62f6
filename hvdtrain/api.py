"""The same from a script or a notebook: run = hvdtrain.train({"epochs": 3}); hvdtrain.read(run) is a DataFrame."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.train import raise_alone
from hvdtrain.cli.train import train as train_words
from hvdtrain.comm.placement import placement
from hvdtrain.config.schema import SECTIONS, takes_text
from hvdtrain.config.section import COMMAND_LINE
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Run:
    """What a job left."""

    folder: Path  # config.yaml, events.jsonl, checkpoints
    rank: int  # of this process; 0 without a launcher. All else but `seconds` is equal on all ranks
    code: int  # 0: done; 75: stopped before its end, the same call with run=folder goes on
    why: str  # it ended
    accuracy: float  # of the last evaluation; NaN without one
    best_accuracy: float
    epochs: float  # done
    steps: int
    seconds: float  # spent, over all its runs


def train(config: Mapping[str, Any] | str | Path | None = None, *words: str) -> Run:
    """Trains, as `python -m hvdtrain` does, on one process or as one rank of those that mpirun or srun started with this script.

    config: the keys of `python -m hvdtrain --help`, nested or dotted, {"epochs": 3, "model": {"name": Net}}, where a class stands for its
    import path; or a YAML file. `words` are key=value, and win over it. Every rank calls it with the same. On one process an error is
    raised (UserError: something to mend in what was given); of several ranks one that fails ends all, with its traceback.
    """
    path = str(config) if isinstance(config, (str, Path)) else None
    given = [] if path or config is None else list(_words(config, ""))  # type: ignore[arg-type]
    try:
        outcome = train_words(path, [*given, *words], raise_alone, from_script=True)
    except UserError as error:
        error.where = error.where.replace(COMMAND_LINE, "hvdtrain.train()")
        raise
    now = outcome.train_state
    assert outcome.run is not None and now is not None, outcome
    numbers = (now.accuracy, now.best, now.progress.epochs, now.progress.step, now.seconds)
    return Run(outcome.run, placement(os.environ).rank, outcome.code, outcome.why, *numbers)


def read(run: Run | str | Path, *, step_times: bool = False) -> pandas.DataFrame:
    """A run's events of kind step, epoch and target, a row each, with their fields as columns (docs/events.md).

    With step_times those of single steps (log.step_times) too. The job may run, be over, or have been killed.
    """
    from hvdtrain.report.dataframe import to_dataframe
    from hvdtrain.report.run import read_run

    folder = run.folder if isinstance(run, Run) else Path(os.path.expanduser(run))
    return to_dataframe(read_run(folder, step_times))


def _words(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """key=value for each value of a configuration."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not prefix and name in SECTIONS:
            yield from _words(value, f"{key}.")
        else:
            yield f"{key}={_text(key, value)}"


def _text(key: str, value: Any) -> str:
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        if "<" in value.__qualname__:  # a lambda, or made inside of a function
            raise UserError(
                f"{key} is {value.__qualname__}, which has no name to import", "hvdtrain.train()", "define it at the top of the file"
            )
        return f"{value.__module__}:{value.__qualname__}"
    value = value.item() if hasattr(value, "item") and not getattr(value, "ndim", 1) else value  # of numpy
    if isinstance(value, (str, Path)):
        return str(value) if takes_text(key) else json.dumps(str(value))
    try:
        return json.dumps(value)
    except TypeError:
        fix = "texts, numbers, truth values, None, lists, mappings, or a class (not one of its objects)"
        raise UserError(f"{key} is an object of {type(value).__name__}", "hvdtrain.train()", fix) from None
