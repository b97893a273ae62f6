"""Selects the checkpoints of a run to keep: the newest, the best, and those requested by a
script."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.core.folder import Folder
from hvdtrain.training.checkpoint.files import (
    Damaged,
    OpenFolder,
    finished,
    read_numbers,
    remove_from,
    remove_leftovers_from,
)
from hvdtrain.training.progress.train_state import TrainState


def prune(
    run: Path, keep_last: int, keep_best: int, written: Path, open_run: OpenFolder = Folder.open
) -> None:
    """Removes all checkpoints except the newest, the best, those requested by a script, and the one
    just written. Also removes what interrupted writes left behind."""
    folders = finished(run)
    # newer ones are damaged: the job resumed from one before them
    older = folders[: folders.index(written) + 1]
    keep = {*older[-keep_last:], *best(folders, keep_best), *asked_for(older[:-keep_last])}
    with open_run(run) as opened, opened.folder("checkpoints") as checkpoints:
        remove_leftovers_from(checkpoints)
        for folder in older:
            if folder not in keep:
                remove_from(checkpoints, folder.name)


def asked_for(folders: list[Path]) -> list[Path]:
    """Checkpoints that a script asked to keep."""
    return [folder for folder, state in _states(folders).items() if state.is_kept]


def best(folders: list[Path], count: int) -> list[Path]:
    """Returns the best checkpoints by the task's objective, ties in order of age; only checkpoints
    that were evaluated at their own step."""
    return best_first(_states(folders if count else []))[:count]


def _states(folders: list[Path]) -> dict[Path, TrainState]:
    """Returns states of the checkpoints that can be read."""
    states = {}
    for folder in folders:
        with contextlib.suppress(Damaged):
            states[folder] = read_numbers(folder).train_state
    return states


def best_first(states: Mapping[Path, TrainState]) -> list[Path]:
    """Sorts checkpoints, given oldest first, by their objective. Keeps only the ones evaluated at
    their own step, on as many samples as the newest of them."""
    rated = {
        folder: state
        for folder, state in states.items()
        if state.evaluated == state.progress.step and not math.isnan(state.last)
    }
    newest = next(reversed(rated.values()), None)
    same = [
        folder for folder, state in rated.items() if newest is not None and state.comparable(newest)
    ]
    return sorted(
        same, key=lambda folder: (rated[folder].rank_of_last, rated[folder].progress.step)
    )
