"""What a run came to, in numbers and in words: speed, accuracy, time, energy, and the rank that the others wait for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from hvdtrain.report.run import Fields, Record, number, numbers

LONGEST = 40  # characters of a run's name in a legend
OWN_WORK = 1.1  # a rank whose own work takes so many times the median holds the others up


class Target(NamedTuple):
    """An accuracy that was reached; NaN for what is not known."""

    accuracy: float
    seconds: float
    epochs: float
    images: float
    joules: float


class Straggler(NamedTuple):
    """The rank with the most work of its own in a step."""

    rank: int
    host: str
    ms: float
    median_ms: float


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def first(*values: float) -> float:
    """The first that is known."""
    return next(iter(finite(values)), math.nan)


def images_per_s(record: Record) -> float:
    """Of training, over the whole job: images by seconds, not a mean of rates."""
    epochs = [(number(event, "images_per_s"), number(event, "epoch_s")) for event in record.epochs()]
    steps = [(number(event, "images_per_s"), first(number(event, "window_s"), 1.0)) for event in record.steps()]
    return first(number(record.end, "images_per_s"), _rate(epochs), _rate(steps))


def _rate(parts: list[tuple[float, float]]) -> float:
    """The mean of rates, from (images a second, seconds) or (joules an image, images)."""
    parts = [part for part in parts if all(map(math.isfinite, part))]
    seconds = sum(part[1] for part in parts)
    return sum(rate * part for rate, part in parts) / seconds if seconds else math.nan


def last_accuracy(record: Record) -> float:
    return next(iter(finite(number(event, "val_accuracy") for event in reversed(record.epochs()))), math.nan)


def best_accuracy(record: Record) -> float:
    return max(
        finite([number(record.end, "best_accuracy"), *(number(event, "val_accuracy") for event in record.epochs())]), default=math.nan
    )


def epochs_done(record: Record) -> float:
    last = record.steps()[-1] if record.steps() else {}
    of_epochs = [number(event, "epoch") for event in record.epochs()]
    return first(number(record.end, "epochs"), number(last, "epochs"), *reversed(of_epochs))


def job_seconds(record: Record) -> float:
    """Up to the last event that tells of it."""
    told = [number(event, "seconds") for event in record.events if event["kind"] not in ("target", "start")]
    return first(*reversed(told), record.seconds(record.events[-1]))


def joules_per_image(record: Record) -> float:
    """Of the job; while it has no end, of its epochs by their images: of those that count the same hardware as the last."""
    epochs = [event for event in record.epochs() if math.isfinite(number(event, "joules_per_image"))]
    alike = [event for event in epochs if counted(event) == counted(epochs[-1])]
    images = [first(number(event, "images_per_s") * number(event, "epoch_s"), 1.0) for event in alike]
    rates = [number(event, "joules_per_image") for event in alike]
    return first(number(record.end, "joules_per_image"), _rate(list(zip(rates, images, strict=True))))


def counted(event: Fields) -> set[str] | None:
    """The kinds of hardware whose joules an event tells; None where it does not say."""
    joules = event.get("joules")
    if not isinstance(joules, dict) or (not joules and math.isfinite(number(event, "joules_per_image"))):
        return None
    return set(map(str, joules))


def energy_words(record: Record) -> str:
    """Joules per image and what they are of, or why there are none."""
    told = record.start.get("energy")
    if not isinstance(told, dict):
        return "not recorded"
    names = {kind: {"gpu": "GPUs", "cpu": "processors"}.get(str(kind), str(kind)) for kind in told}
    last = next((kinds for event in (record.end, *reversed(record.epochs())) if (kinds := counted(event)) is not None), set(told))
    lost = "a counter failed during the job" if len(record.of("start")) == 1 else "not counted in every start of the job"
    whys = {kind: why or (lost if kind not in last else "") for kind, why in told.items()}
    absent = "; ".join(f"{names[kind]}: {why}" for kind, why in whys.items() if why)
    measured = " and ".join(names[kind] for kind, why in whys.items() if not why)
    joules = joules_per_image(record)
    if not math.isfinite(joules):
        return f"not measured: {absent or 'no epoch has ended'}"
    return f"{joules:.3g} J ({measured or 'of what was measured'})" + (f"; not measured: {absent}" if absent else "")


def targets(record: Record) -> list[Target]:
    """In the order of the accuracies."""
    found = {
        number(event, "target"): Target(
            number(event, "target"), record.seconds(event), number(event, "epochs"), number(event, "images"), number(event, "joules")
        )
        for event in reversed(record.of("target"))  # the first time that it was reached counts
    }
    return [found[accuracy] for accuracy in sorted(found) if math.isfinite(accuracy)]


def rank_work_ms(record: Record) -> list[float]:
    """For each rank the mean over the epochs of the last start; empty where no epoch tells."""
    rows = [row for event in record.epochs() if (row := numbers(event, "rank_work_ms"))]
    rows = [row for row in rows if len(row) == len(rows[-1])]  # a job that goes on on fewer ranks has other ranks
    means = [finite(column) for column in zip(*rows, strict=True)]
    return [sum(column) / len(column) if column else math.nan for column in means]


def straggler(record: Record) -> Straggler | None:
    """None on one rank, and where nothing was measured."""
    work = rank_work_ms(record)
    known = finite(work)
    if len(known) < 2:
        return None
    rank = max(range(len(work)), key=lambda rank: work[rank] if math.isfinite(work[rank]) else -math.inf)
    return Straggler(rank, host_of(record.start, rank), work[rank], median(known))


def host_of(start: Fields, rank: int) -> str:
    """Empty where it is not known."""
    hosts = start.get("host_of_rank")
    return str(hosts[rank]) if isinstance(hosts, list) and rank < len(hosts) else ""


def straggler_words(record: Record) -> str:
    """One sentence; empty where there is nothing to say."""
    if not (found := straggler(record)):
        return ""
    on = f" on {found.host}" if found.host else ""
    line = f"rank {found.rank}{on} is slowest: {found.ms:.3g} ms of own work a step, median {found.median_ms:.3g}"
    return line if found.ms > OWN_WORK * found.median_ms else f"{line}: the ranks are even"


def duration(seconds: float) -> str:
    """1.42 s, 3 min 20 s, 2 h 05 min."""
    if not math.isfinite(seconds):
        return ""
    if seconds < 60:
        return f"{seconds:.3g} s" if seconds < 59.95 else "1 min 00 s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def labels(records: Sequence[Record]) -> list[str]:
    """A short name for each run: what its path has and the others' paths have not."""
    parts = [record.folder.absolute().parts for record in records]
    if len(parts) == 1:
        return [_short(parts[0][-1])]
    same = _alike(parts)
    tail = _alike([one[:same:-1] for one in parts])
    names = ["/".join(one[same : len(one) - tail]) for one in parts]
    head = names[0][: _alike(names)]
    cut = max(head.rfind(mark) for mark in "-_/ ") + 1  # whole words only
    names = [_short(name[cut:] or name or "/".join(one)) for name, one in zip(names, parts, strict=True)]
    return names if len(set(names)) == len(names) else [f"{place}: {name}" for place, name in enumerate(names, 1)]


def _alike(sequences: Sequence[Sequence[str]]) -> int:
    """How many of their first elements are equal."""
    return next((place for place, ones in enumerate(zip(*sequences, strict=False)) if len(set(ones)) > 1), min(map(len, sequences)))


def _short(name: str) -> str:
    name = "".join(letter if letter.isprintable() else "?" for letter in name)
    return name if len(name) <= LONGEST else f"{name[: LONGEST // 2]}...{name[-LONGEST // 2 + 3 :]}"
