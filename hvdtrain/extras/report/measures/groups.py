"""Runs that differ only in the seed form a group, which figures draw as one line; names of runs and
groups say what differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdtrain.config.sections.extra_keys import defaults
from hvdtrain.events.redaction import redact
from hvdtrain.extras.compare.differing import differing_keys
from hvdtrain.extras.report.measures import summary
from hvdtrain.extras.report.measures.compare import is_about_training
from hvdtrain.records.run import RunRecord, number

SEED = "seed"
MOST_KEYS = 3  # in a name; runs that differ in more are named by their folders
LONGEST_NAME = 64  # characters; a longer one does not fit below a figure
# of the start event: the parts of a script that the configuration does not describe
_SCRIPT_FIELDS = ("ranks", "framework", "model", "parameters", "samples", "objective")


class RunGroup(NamedTuple):
    """Runs that differ only in the seed; most often a single one."""

    name: str
    runs: list[RunRecord]


def group_runs(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[RunGroup]:
    """Groups runs, in the order of the first run of each group. labels: the names of the runs.

    A group has several runs if their seeds all differ. Runs with equal seeds are repetitions, whose
    difference is not one of seeds: each is a group of its own. So is a run without a configuration.
    """
    groups = [
        members
        for same in _same_but_for_the_seed(runs)
        for members in ([same] if _have_different_seeds(runs, same) else [[one] for one in same])
    ]
    groups.sort(key=lambda members: members[0])
    names = _names(runs, [members[0] for members in groups], with_seed=False)
    return [
        RunGroup(
            labels[members[0]]
            if len(members) == 1
            else name or _common_name([labels[index] for index in members]),
            [runs[index] for index in members],
        )
        for members, name in zip(groups, names or [""] * len(groups), strict=True)
    ]


def run_labels(runs: Sequence[RunRecord]) -> list[str]:
    """Returns a short name for each run: the keys in which it differs from the others, or the part
    of its path in which it does if the keys are too many or do not distinguish the runs."""
    if len(runs) == 1:
        return summary.labels(runs)
    return _names(runs, range(len(runs)), with_seed=True) or summary.labels(runs)


def _same_but_for_the_seed(runs: Sequence[RunRecord]) -> list[list[int]]:
    """Returns the indices of runs that train the same, except for the seed."""
    groups: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        key = _training_key(run) if run.config else f"without a configuration: {index}"
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def _have_different_seeds(runs: Sequence[RunRecord], indices: Sequence[int]) -> bool:
    seeds = {json.dumps(runs[index].config.get(SEED), default=str) for index in indices}
    return len(seeds) == len(indices)


def _training_key(run: RunRecord) -> str:
    """Returns a text that is equal for runs that differ only in the seed, in places and in what
    they log."""
    config = {
        key: value
        for key, value in (defaults() | run.config).items()
        if is_about_training(key) and key != SEED
    }
    start = run.start_event
    values = [
        sorted(config.items()),
        [start.get(field) for field in _SCRIPT_FIELDS],
        _rate_of_a_script(run),
    ]
    return json.dumps(values, sort_keys=True, default=str)


def _rate_of_a_script(run: RunRecord) -> list[float]:
    """Returns the first learning rate and batch of a custom loop, whose configuration has neither;
    empty for other runs."""
    if "optim.base_lr" in run.config:
        return []
    first = next(iter(run.step_events()), {})
    return [number(first, "lr"), number(first, "batch")]


def _names(runs: Sequence[RunRecord], shown: Sequence[int], *, with_seed: bool) -> list[str]:
    """Returns `optim.base_lr=0.1, ranks=2` for each of the runs that are shown, by what differs
    between all; empty if such names are too long, or equal for two of them."""
    keys = [(key, values) for key, values in differing_keys(runs) if is_about_training(key)]
    seeds = [pair for pair in keys if pair[0] == SEED]
    keys = [pair for pair in keys if pair[0] != SEED]
    ranks = [run.ranks for run in runs]
    if len(set(ranks)) > 1:
        keys.append(("ranks", ranks))
    if len(keys) > MOST_KEYS:
        return []
    keys += seeds if with_seed else []
    names = [", ".join(_assignment(key, values[index]) for key, values in keys) for index in shown]
    are_usable = all(0 < len(name) <= LONGEST_NAME for name in names)
    return names if are_usable and len(set(names)) == len(names) else []


def _assignment(key: str, value: Any) -> str:
    """Formats `optim.base_lr=0.1`, with a secret hidden."""
    value = redact({key: value})[key]
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return f"{key}={''.join(letter if letter.isprintable() else '?' for letter in text)}"


def _common_name(labels: Sequence[str]) -> str:
    """Returns the beginning that the labels of a group share, in whole words; all of them if they
    share none."""
    start = labels[0][: summary.common_prefix(labels)]
    cut = max(start.rfind(separator) for separator in "-_/ ,.")
    shared = start[: max(cut, 0)].rstrip("-_/ ,.")
    return shared or summary.shortened(", ".join(labels))
