"""Compares runs: the configuration keys in which they differ, and how they scale over ranks, with
the spread over seeds."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hvdtrain.config.schema import of_sections
from hvdtrain.config.sections.extra_keys import defaults
from hvdtrain.extras.report.measures import summary
from hvdtrain.records.run import Fields, RunRecord, number

# Keys that do not change what is trained: where data and files are, and how ranks find each other.
_LOCATION_KEYS = (
    "run",
    "resume",
    "data.root",
    "data.stage",
    "data.ahead",
    "data.readers",
    "data.workers",
    "comm.address",
    "comm.timeout_s",
)
_MODEL_KEYS = tuple(key for keys in of_sections("dividing") for key in keys)
_OBSERVATION_PREFIXES = ("log.", "guard.", "checkpoint.", "profile.")
# keys that affect what ranks send each other, not the training result
_COMMUNICATION_PREFIXES = (
    "comm.",
    "parallel.",
    "shard.",
)
# with more ranks, either the global batch or the batch of each rank stays constant
_BATCH_KEYS = (
    "batch.size",
    "batch.per_rank",
)
_START_FIELDS = ("ranks", "engine", "device")
SHORTEST_S = 10.0  # least seconds of a job whose speed is compared: a shorter job is mostly startup


class Spread(NamedTuple):
    """Repeated measurements of one quantity; NaN for unknown values."""

    mean: float
    sd: float  # standard deviation of the sample; NaN for one value
    n: int


class ScalingRow(NamedTuple):
    """All runs of a comparison on one number of ranks, relative to the runs on the fewest ranks."""

    ranks: int
    seeds: str
    samples_per_s: Spread
    speed_up: float
    efficiency: float  # speed-up divided by the ratio of the ranks
    seconds: Spread  # of the jobs that ran to their end
    last: Spread  # value of the objective of these jobs
    joules_per_sample: Spread
    energy_ratio: float


class ScalingComparison(NamedTuple):
    """Runs of one configuration on at least two numbers of ranks; rows by ranks."""

    batch: str  # their common batch, for people
    rows: list[ScalingRow]
    runs: list[RunRecord]


def is_about_training(key: str) -> bool:
    """Whether a key may change what is trained: it is not a place, and not about logs, guards or
    checkpoints."""
    return key not in _LOCATION_KEYS and not key.startswith(_OBSERVATION_PREFIXES)


def spread(values: list[float]) -> Spread:
    known = summary.finite(values)
    return Spread(
        fmean(known) if known else math.nan,
        stdev(known) if len(known) > 1 else math.nan,
        len(known),
    )


def scaling_comparisons(runs: Sequence[RunRecord]) -> list[ScalingComparison]:
    """Returns comparisons at a constant global batch (strong scaling) and at a constant batch per
    rank (weak scaling).

    Skips short runs, runs that changed ranks, engine or device, and runs whose configuration or
    ranks are unknown.
    """
    comparable = [
        run
        for run in runs
        if run.config and run.ranks and not changes_between_starts(run) and not is_short(run)
    ]
    return [
        comparison
        for same_training in _groups(comparable, _training_key)
        for same_communication in _by_communication(same_training)
        for scaling in _SCALINGS
        for comparison in _at_constant_batch(same_communication, scaling)
    ]


def is_short(run: RunRecord) -> bool:
    """Whether the job was too short for its speed to be meaningful."""
    return summary.job_seconds(run) < SHORTEST_S


def changes_between_starts(run: RunRecord) -> str:
    """Returns the changes of a resumed job, such as "ranks 1, then 2"; empty if there are none. A
    start whose steps were all repeated does not count."""
    starts: list[Fields] = []
    for start in run.events_of("start"):
        starts = [*(old for old in starts if number(old, "step") < number(start, "step")), start]
    changes = []
    for field in _START_FIELDS:
        values = list(
            dict.fromkeys(str(start[field]) for start in starts if start.get(field) is not None)
        )
        if len(values) > 1:
            changes.append(f"{field} {', then '.join(values)}")
    return "; ".join(changes)


def global_batch(run: RunRecord) -> float:
    """Returns the samples of a step over all ranks: batch.size, else from the first step event; NaN
    if neither is known."""
    first_step = next(iter(run.step_events()), {})
    return summary.first_finite(
        number({"size": run.config.get("batch.size")}, "size"), number(first_step, "batch")
    )


def _batch_of_rank(run: RunRecord) -> float:
    return global_batch(run) / (run.ranks or 1)


class _Scaling(NamedTuple):
    """The kind of batch that stays constant while the number of ranks changes."""

    description: str  # with {:g} for the batch
    batch: Callable[[RunRecord], float]


_SCALINGS = (
    _Scaling("{:g} over all ranks (strong scaling)", global_batch),
    _Scaling("{:g} on each rank (weak scaling)", _batch_of_rank),
)


def _groups(runs: Sequence[RunRecord], key: Callable[[RunRecord], Any]) -> list[list[RunRecord]]:
    """Groups runs with equal keys, in the order in which the keys appear."""
    groups: dict[Any, list[RunRecord]] = defaultdict(list)
    for run in runs:
        groups[key(run)].append(run)
    return list(groups.values())


def _training_key(run: RunRecord) -> str:
    """Returns a key that is equal for runs that train the same, regardless of seed, ranks and
    communication."""
    ignored_keys = (*_BATCH_KEYS, "seed")
    config = {
        key: value
        for key, value in (defaults() | run.config).items()
        if is_about_training(key)
        and key not in ignored_keys
        and not key.startswith(_COMMUNICATION_PREFIXES)
    }
    energy = run.start_event.get("energy")
    # speed.device=auto depends on the machine
    on_gpus = isinstance(energy, dict) and "gpu" in energy
    return _json([sorted(config.items()), run.start_event.get("device"), on_gpus])


def _communication_key(run: RunRecord) -> str:
    """Returns a key that is equal for runs whose ranks communicate in the same way."""
    config = {
        key: value
        for key, value in (defaults() | run.config).items()
        if key.startswith(_COMMUNICATION_PREFIXES) and key not in _LOCATION_KEYS
    }
    return _json([run.start_event.get("engine"), sorted(config.items())])


def _by_communication(runs: list[RunRecord]) -> list[list[RunRecord]]:
    """Groups runs by their communication settings. Runs on one rank, which do not communicate, are
    in every group."""
    single = [run for run in runs if run.ranks == 1]
    several = [run for run in runs if run.ranks != 1]
    return [single + group for group in _groups(several, _communication_key)]


def _at_constant_batch(runs: list[RunRecord], scaling: _Scaling) -> list[ScalingComparison]:
    """Groups runs by batch, ascending; batches with only one number of ranks are skipped."""
    known = [run for run in runs if math.isfinite(scaling.batch(run))]
    groups = sorted(_groups(known, scaling.batch), key=lambda group: scaling.batch(group[0]))
    return [
        ScalingComparison(
            scaling.description.format(scaling.batch(group[0])) + _of_models(group),
            _scaling_rows(group),
            group,
        )
        for group in groups
        if len({run.ranks for run in group}) > 1
    ]


def _of_models(group: Sequence[RunRecord]) -> str:
    """Returns the model parallelism of runs: ", parallel.tensor=2"; empty if every rank has a whole
    model."""
    keys = {
        f"{key}={run.config.get(key)}" for run in group for key in _MODEL_KEYS if run.ranks != 1
    }
    given = sorted(key for key in keys if not key.endswith(("=1", "=none", "=None")))
    return f", {', '.join(given)}" if given else ""


def _scaling_rows(runs: list[RunRecord]) -> list[ScalingRow]:
    """Returns a row for each number of ranks, the fewest first: the other rows are compared with
    it."""
    rows: list[ScalingRow] = []
    for group in sorted(
        _groups(runs, lambda run: run.ranks), key=lambda group: group[0].ranks or 1
    ):
        ranks = group[0].ranks or 1
        finished = [run for run in group if run.end_event.get("kind") == "end"]
        samples_per_s = spread([summary.samples_per_s(run) for run in group])
        joules_per_sample = spread([summary.joules_per_sample(run) for run in group])
        base_ranks = rows[0].ranks if rows else ranks
        speed_up = _ratio(
            samples_per_s.mean, (rows[0].samples_per_s if rows else samples_per_s).mean
        )
        row = ScalingRow(
            ranks=ranks,
            seeds=", ".join(sorted({_json(run.config.get("seed")) for run in group})),
            samples_per_s=samples_per_s,
            speed_up=speed_up,
            efficiency=speed_up * base_ranks / ranks,
            seconds=spread([summary.job_seconds(run) for run in finished]),
            last=spread([summary.last_value(run) for run in finished]),
            joules_per_sample=joules_per_sample,
            energy_ratio=_ratio(
                joules_per_sample.mean,
                (rows[0].joules_per_sample if rows else joules_per_sample).mean,
            ),
        )
        rows.append(row)
    return rows


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
