"""Runs side by side: the keys in which they differ, and what more ranks brought, over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

from hvdtrain.report import summary
from hvdtrain.report.run import Fields, Record, number

_PLACE = ("run", "resume", "data.root", "data.stage", "data.ahead", "data.readers", "comm.address", "comm.timeout_s")  # not what is trained
_WATCH = ("log.", "guard.", "checkpoint.", "profile.")
_OF_START = ("ranks", "engine", "device")  # what each start tells of its place
_OF_RANKS = ("batch.size", "batch.per_rank")  # a job on more ranks keeps either the whole batch or that of a rank


class Spread(NamedTuple):
    """Some measurements of the same thing; NaN for what is not known."""

    mean: float
    sd: float  # of the sample; NaN for one value
    n: int


class Row(NamedTuple):
    """All runs of a comparison on so many ranks, against those on the fewest."""

    ranks: int
    seeds: str
    images_per_s: Spread
    speed_up: float
    efficiency: float  # speed-up by ranks
    seconds: Spread  # of the jobs that reached their end
    accuracy: Spread  # the last, of those too
    joules_per_image: Spread
    energy_ratio: float


class Comparison(NamedTuple):
    """Runs of one configuration on two numbers of ranks or more; rows by ranks."""

    batch: str  # which batch they have in common
    rows: list[Row]
    records: list[Record]


def spread(values: list[float]) -> Spread:
    known = summary.finite(values)
    return Spread(fmean(known) if known else math.nan, stdev(known) if len(known) > 1 else math.nan, len(known))


def differing(records: Sequence[Record]) -> list[tuple[str, list[Any]]]:
    """(key, the value of each run) where they are not all equal; None where a run has no such key. Where it was written is no key."""
    keys = dict.fromkeys(key for record in records for key in record.config if key != "run")
    rows = [(key, [record.config.get(key) for record in records]) for key in keys]
    return [(key, values) for key, values in rows if len({_text(value) for value in values}) > 1]


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Of the same batch over all ranks (strong scaling), and of the same batch on each rank (weak scaling).

    A job that went on in another place is of no number of ranks. Of an unknown configuration nothing can be said.
    """
    families: dict[str, list[Record]] = {}
    for record in records:
        if record.config and record.ranks and not changed_places(record):
            families.setdefault(_trained(record), []).append(record)
    return [one for family in families.values() for way in _ways(family) for kind in _KINDS for one in _compared(way, *kind)]


def changed_places(record: Record) -> str:
    """What a job that goes on has changed, as "ranks 1, then 2"; empty where nothing. A start whose steps were all done again is none."""
    starts: list[Fields] = []
    for start in record.of("start"):
        starts = [*(old for old in starts if number(old, "step") < number(start, "step")), start]
    told = {name: list(dict.fromkeys(str(start[name]) for start in starts if start.get(name) is not None)) for name in _OF_START}
    return "; ".join(f"{name} {', then '.join(values)}" for name, values in told.items() if len(values) > 1)


def _trained(record: Record) -> str:
    """What is trained, whatever the seed, the ranks and how they talk."""
    config = record.config
    kept = {key: config[key] for key in config if key not in (*_PLACE, *_OF_RANKS, "seed") and not key.startswith(("comm.", *_WATCH))}
    energy = record.start.get("energy")
    gpus = isinstance(energy, dict) and "gpu" in energy  # speed.device=auto takes what the machine has
    return _text([sorted(kept.items()), record.start.get("device"), gpus])


def _ways(family: list[Record]) -> list[list[Record]]:
    """One list for each way in which ranks talk, with the jobs on one rank in each of them: those talk to nobody."""
    alone = [record for record in family if record.ranks == 1]
    ways: dict[str, list[Record]] = {}
    for record in family:
        if record.ranks != 1:
            keys = {key: value for key, value in record.config.items() if key.startswith("comm.") and key not in _PLACE}
            ways.setdefault(_text([record.start.get("engine"), sorted(keys.items())]), []).append(record)
    return [alone + way for way in ways.values()]


def batch_of(record: Record) -> float:
    """Over all ranks, of the first step where the configuration does not tell."""
    first_step = next(iter(record.steps()), {})
    return summary.first(number({"size": record.config.get("batch.size")}, "size"), number(first_step, "batch"))


def _per_rank(record: Record) -> float:
    return batch_of(record) / (record.ranks or 1)


_KINDS: tuple[tuple[str, Callable[[Record], float]], ...] = (
    ("{:g} over all ranks (strong scaling)", batch_of),
    ("{:g} on each rank (weak scaling)", _per_rank),
)


def _compared(way: list[Record], words: str, batch: Callable[[Record], float]) -> list[Comparison]:
    by_batch: dict[float, list[Record]] = {}
    for record in way:
        if math.isfinite(size := batch(record)):
            by_batch.setdefault(size, []).append(record)
    return [
        Comparison(words.format(size), _rows(same), same) for size, same in sorted(by_batch.items()) if len({one.ranks for one in same}) > 1
    ]


def _rows(records: list[Record]) -> list[Row]:
    by_ranks: dict[int, list[Record]] = {}
    for record in records:
        by_ranks.setdefault(record.ranks or 1, []).append(record)
    rows: list[Row] = []
    for ranks, same in sorted(by_ranks.items()):
        done = [record for record in same if record.end.get("kind") == "end"]
        speed, joules = (spread(list(map(of, same))) for of in (summary.images_per_s, summary.joules_per_image))
        base_ranks, base_speed, base_joules = (
            (rows[0].ranks, rows[0].images_per_s, rows[0].joules_per_image) if rows else (ranks, speed, joules)
        )
        row = Row(
            ranks=ranks,
            seeds=", ".join(sorted({_text(record.config.get("seed")) for record in same})),
            images_per_s=speed,
            speed_up=_ratio(speed.mean, base_speed.mean),
            efficiency=_ratio(speed.mean, base_speed.mean) * base_ranks / ranks,
            seconds=spread(list(map(summary.job_seconds, done))),
            accuracy=spread(list(map(summary.last_accuracy, done))),
            joules_per_image=joules,
            energy_ratio=_ratio(joules.mean, base_joules.mean),
        )
        rows.append(row)
    return rows


def _ratio(value: float, base: float) -> float:
    return value / base if base else math.nan


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
