"""Training and reading from a script or a notebook: run = hvdtrain.train({"epochs": 3}); hvdtrain.read(run) is a DataFrame."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.errors import UserError
from hvdtrain.training.failure import RankFailed

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


def train(config: Mapping[str, Any] | str | Path | None = None, *arguments: str) -> Run:
    """Trains, as `python -m hvdtrain` does, on one process or as one rank of those that mpirun or srun started with this script.

    config: the keys of `python -m hvdtrain --help`, nested or dotted, {"epochs": 3, "model": {"name": Net}}, where a class stands for its
    import path; or a YAML file. `arguments` are key=value, and win over it. Every rank calls it with the same. On one process an error
    is raised (UserError: a mistake in what was given); where one of several ranks fails, its error is printed and all ranks end.
    """
    from hvdtrain.comm.placement import placement
    from hvdtrain.config.section import COMMAND_LINE
    from hvdtrain.training.run_rank import run_rank

    config_file = str(config) if isinstance(config, (str, Path)) else None
    if isinstance(config, Mapping):
        arguments = (*_assignments(config, ""), *arguments)
    try:
        result = run_rank(config_file, arguments, from_script=True)
    except UserError as error:
        error.where = error.where.replace(COMMAND_LINE, "hvdtrain.train()")
        raise
    except RankFailed as failed:
        sys.exit(failed.code)
    now = result.train_state
    return Run(
        folder=result.run,
        rank=placement(os.environ).rank,
        code=result.code,
        why=result.reason,
        accuracy=now.accuracy,
        best_accuracy=now.best,
        epochs=now.progress.epochs,
        steps=now.progress.step,
        seconds=now.seconds,
    )


def read(run: Run | str | Path, *, step_times: bool = False) -> pandas.DataFrame:
    """A run's events of kind step, epoch and target, a row each, with their fields as columns (docs/events.md).

    With step_times those of single steps (log.step_times) too. The job may run, be over, or have been killed.
    """
    from hvdtrain.report.dataframe import to_dataframe
    from hvdtrain.report.run import read_run

    folder = run.folder if isinstance(run, Run) else Path(os.path.expanduser(run))
    return to_dataframe(read_run(folder, step_times))


def _assignments(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """key=value for each value of a configuration."""
    from hvdtrain.config.schema import SECTIONS

    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and not prefix and name in SECTIONS:
            yield from _assignments(value, f"{key}.")
        else:
            yield f"{key}={_yaml(key, value)}"


def _yaml(key: str, value: Any) -> str:
    """A value as it is written on the command line. Raises UserError where it cannot be."""
    from hvdtrain.config.schema import takes_text

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
