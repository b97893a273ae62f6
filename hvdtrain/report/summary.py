"""The key figures of a run: speed, accuracy, time, energy, and its slowest rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from hvdtrain.report.run import Fields, RunRecord, number, numbers

LONGEST_LABEL = 40  # characters of a run's name in a legend
SLOW = 1.1  # times the median of the ranks' own work; a rank above that holds the others up
_ENERGY_NAMES = {"gpu": "GPUs", "cpu": "processors"}


class Target(NamedTuple):
    """An accuracy that was reached, and what it took; NaN for what is not known."""

    accuracy: float
    seconds: float
    epochs: float
    images: float
    joules: float


class Straggler(NamedTuple):
    """The rank with the most work of its own in a step."""

    rank: int
    host: str  # empty where it is not known
    work_ms: float
    median_ms: float  # of all ranks


class _WeightedRate(NamedTuple):
    """Images per second during some seconds, or joules per image of some images."""

    rate: float
    weight: float


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def first_finite(*values: float) -> float:
    """NaN where none is."""
    return next(iter(finite(values)), math.nan)


def images_per_s(run: RunRecord) -> float:
    """Of training, over the whole job: all images by all seconds, not a mean of rates."""
    epochs = [_WeightedRate(number(event, "images_per_s"), number(event, "epoch_s")) for event in run.epoch_events()]
    steps = [_WeightedRate(number(event, "images_per_s"), first_finite(number(event, "window_s"), 1.0)) for event in run.step_events()]
    return first_finite(number(run.end_event, "images_per_s"), _weighted_mean(epochs), _weighted_mean(steps))


def _weighted_mean(rates: list[_WeightedRate]) -> float:
    """NaN where no rate and its weight are known."""
    known = [one for one in rates if math.isfinite(one.rate) and math.isfinite(one.weight)]
    total = sum(one.weight for one in known)
    return sum(one.rate * one.weight for one in known) / total if total else math.nan


def last_accuracy(run: RunRecord) -> float:
    """Of the last evaluation; NaN without one."""
    return first_finite(*(number(event, "val_accuracy") for event in reversed(run.epoch_events())))


def best_accuracy(run: RunRecord) -> float:
    """Of all evaluations; NaN without one."""
    evaluated = [number(event, "val_accuracy") for event in run.epoch_events()]
    return max(finite([number(run.end_event, "best_accuracy"), *evaluated]), default=math.nan)


def epochs_done(run: RunRecord) -> float:
    steps = run.step_events()
    of_last_step = number(steps[-1], "epochs") if steps else math.nan
    of_evaluations = [number(event, "epoch") for event in reversed(run.epoch_events())]
    return first_finite(number(run.end_event, "epochs"), of_last_step, *of_evaluations)


def job_seconds(run: RunRecord) -> float:
    """Up to the last event that has `seconds`; else up to the last event."""
    known = [number(event, "seconds") for event in run.events if event["kind"] not in ("target", "start")]
    return first_finite(*reversed(known), run.seconds_at(run.events[-1]))


def joules_per_image(run: RunRecord) -> float:
    """Of the job; while it has no end, the mean of the epochs that measured the same hardware as the last one, weighted by images."""
    of_job = number(run.end_event, "joules_per_image")
    if math.isfinite(of_job):
        return of_job
    measured = [event for event in run.epoch_events() if math.isfinite(number(event, "joules_per_image"))]
    rates = []
    for event in measured:
        if measured_hardware(event) == measured_hardware(measured[-1]):
            images = first_finite(number(event, "images_per_s") * number(event, "epoch_s"), 1.0)
            rates.append(_WeightedRate(number(event, "joules_per_image"), images))
    return _weighted_mean(rates)


def measured_hardware(event: Fields) -> set[str] | None:
    """The kinds of hardware (gpu, cpu) whose joules an event has; None where it does not say which."""
    joules = event.get("joules")
    if not isinstance(joules, dict) or (not joules and math.isfinite(number(event, "joules_per_image"))):
        return None
    return set(map(str, joules))


def energy_summary(run: RunRecord) -> str:
    """Joules per image and of which hardware, or why there are none: 0.6 J (GPUs); not measured: processors: no counter"""
    energy = run.start_event.get("energy")  # kind of hardware -> empty where it is measured, else why not
    if not isinstance(energy, dict):
        return "not recorded"
    lost = _lost_counters(run, set(energy))
    measured, missing = [], []
    for kind, reason in energy.items():
        name = _ENERGY_NAMES.get(str(kind), str(kind))
        why = reason or lost.get(kind, "")
        if why:
            missing.append(f"{name}: {why}")
        else:
            measured.append(name)
    joules = joules_per_image(run)
    if not math.isfinite(joules):
        return f"not measured: {'; '.join(missing) or 'no epoch has ended'}"
    of = " and ".join(measured) or "of what was measured"
    return f"{joules:.3g} J ({of})" + (f"; not measured: {'; '.join(missing)}" if missing else "")


def _lost_counters(run: RunRecord, kinds: set[str]) -> dict[str, str]:
    """Kinds of hardware that the job's last energy figure no longer includes -> why."""
    newest_first = (run.end_event, *reversed(run.epoch_events()))
    included = next((hardware for event in newest_first if (hardware := measured_hardware(event)) is not None), kinds)
    why = "a counter failed during the job" if len(run.events_of("start")) == 1 else "not counted in every start of the job"
    return dict.fromkeys(kinds - included, why)


def targets(run: RunRecord) -> list[Target]:
    """In ascending order of accuracy; of each the first time that it was reached."""
    reached: dict[float, Target] = {}
    for event in run.events_of("target"):
        accuracy = number(event, "target")
        target = Target(accuracy, run.seconds_at(event), number(event, "epochs"), number(event, "images"), number(event, "joules"))
        if math.isfinite(accuracy):
            reached.setdefault(accuracy, target)
    return [reached[accuracy] for accuracy in sorted(reached)]


def rank_work_ms(run: RunRecord) -> list[float]:
    """Own work in a step of each rank, the mean over the epochs on the last number of ranks; empty where no epoch has it."""
    rows = [row for event in run.epoch_events() if (row := numbers(event, "rank_work_ms"))]
    rows = [row for row in rows if len(row) == len(rows[-1])]  # a resumed job may have fewer ranks
    known = [finite(rank) for rank in zip(*rows, strict=True)]
    return [sum(epochs) / len(epochs) if epochs else math.nan for epochs in known]


def straggler(run: RunRecord) -> Straggler | None:
    """None on one rank, and where nothing was measured."""
    work_ms = rank_work_ms(run)
    known = finite(work_ms)
    if len(known) < 2:
        return None
    rank = work_ms.index(max(known))
    return Straggler(rank, host_of(run.start_event, rank), work_ms[rank], median(known))


def host_of(start: Fields, rank: int) -> str:
    """Empty where it is not known."""
    hosts = start.get("host_of_rank")
    return str(hosts[rank]) if isinstance(hosts, list) and rank < len(hosts) else ""


def straggler_summary(run: RunRecord) -> str:
    """One sentence; empty on one rank, and where nothing was measured."""
    slowest = straggler(run)
    if not slowest:
        return ""
    host = f" on {slowest.host}" if slowest.host else ""
    line = f"rank {slowest.rank}{host} is slowest: {slowest.work_ms:.3g} ms of own work a step, median {slowest.median_ms:.3g}"
    return line if slowest.work_ms > SLOW * slowest.median_ms else f"{line}: the ranks are even"


def duration(seconds: float) -> str:
    """1.42 s, 3 min 20 s, 2 h 05 min; empty for NaN."""
    if not math.isfinite(seconds):
        return ""
    if seconds < 59.95:  # above, .3g rounds to 60
        return f"{seconds:.3g} s"
    if seconds < 60:
        return "1 min 00 s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """A short name for each run: the part of its path in which it differs from the others."""
    paths = [run.folder.absolute().parts for run in runs]
    if len(paths) == 1:
        return [_shortened(paths[0][-1])]
    head = _common_prefix(paths)
    tail = _common_prefix([path[:head:-1] for path in paths])
    names = ["/".join(path[head : len(path) - tail]) for path in paths]
    same_letters = names[0][: _common_prefix(names)]
    cut = max(same_letters.rfind(separator) for separator in "-_/ ") + 1  # whole words only
    names = [_shortened(name[cut:] or name or "/".join(path)) for name, path in zip(names, paths, strict=True)]
    if len(set(names)) == len(names):
        return names
    return [f"{index}: {name}" for index, name in enumerate(names, start=1)]


def _common_prefix(sequences: Sequence[Sequence[str]]) -> int:
    """How many of their first elements are equal."""
    length = 0
    for elements in zip(*sequences, strict=False):
        if len(set(elements)) > 1:
            break
        length += 1
    return length


def _shortened(name: str) -> str:
    """At most LONGEST_LABEL printable characters."""
    name = "".join(letter if letter.isprintable() else "?" for letter in name)
    return name if len(name) <= LONGEST_LABEL else f"{name[: LONGEST_LABEL // 2]}...{name[-LONGEST_LABEL // 2 + 3 :]}"
