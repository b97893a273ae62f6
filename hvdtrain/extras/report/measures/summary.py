"""The key figures of a run: speed, objective, time, energy, number of ranks, and slowest rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from hvdtrain.extras.report.measures.mesh import mesh_of
from hvdtrain.records.run import Fields, RunRecord, number, numbers, objective_of

LONGEST_LABEL = 40  # characters of a run's name in a legend
SLOW = 1.1  # times the median of the ranks' own work; a rank above it delays the others
NOT_MEASURED = "not measured: "  # and why
_ENERGY_NAMES = {"gpu": "GPUs", "cpu": "processors"}


class ReachedTarget(NamedTuple):
    """A value of the objective that was reached, and its cost; NaN for unknown values."""

    value: float
    seconds: float
    epochs: float
    samples: float
    joules: float


class Straggler(NamedTuple):
    """The rank with the most own work in a step."""

    rank: int
    host: str  # empty if unknown
    work_ms: float
    median_ms: float  # over all ranks, or with a pipeline over its stage
    place: str = ""  # its place in the mesh

    @property
    def is_slow(self) -> bool:
        """Whether it delays the others; otherwise the ranks are even."""
        return self.work_ms > SLOW * self.median_ms


class _WeightedRate(NamedTuple):
    """Samples per second during some seconds, or joules per sample of some samples."""

    rate: float
    weight: float


def finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def first_finite(*values: float) -> float:
    """Returns the first finite value; NaN if there is none."""
    return next(iter(finite(values)), math.nan)


def samples_per_s(run: RunRecord) -> float:
    """Returns the training rate over the whole job: all samples divided by all seconds, not a mean
    of rates."""
    epochs = [
        _WeightedRate(number(event, "samples_per_s"), number(event, "epoch_s"))
        for event in run.epoch_events()
    ]
    steps = [
        _WeightedRate(number(event, "samples_per_s"), first_finite(number(event, "window_s"), 1.0))
        for event in run.step_events()
    ]
    return first_finite(
        number(run.end_event, "samples_per_s"), _weighted_mean(epochs), _weighted_mean(steps)
    )


def tokens_per_s(run: RunRecord) -> float:
    """Tokens per second over the whole job; NaN for a task without tokens."""
    epochs = [
        _WeightedRate(number(event, "tokens_per_s"), number(event, "epoch_s"))
        for event in run.epoch_events()
    ]
    return first_finite(number(run.end_event, "tokens_per_s"), _weighted_mean(epochs))


def of_each_device(run: RunRecord) -> dict[str, str]:
    """Returns the throughput of one device by row name: samples/s, tokens/s, TFLOP/s, MFU, and the
    share of time in which its GPU is busy. It is over the whole job if the job has ended, else from
    its last event."""
    last: Fields = next(reversed([*run.epoch_events(), *run.step_events()]), {})
    event = run.end_event if "device_samples_per_s" in run.end_event else last
    rows = {
        "samples/s of a device": f"{number(event, 'device_samples_per_s'):,.4g}",
        "tokens/s of a device": f"{number(event, 'device_tokens_per_s'):,.4g}",
        "TFLOP/s of a device": f"{number(event, 'device_tflops'):.3g}",
        "MFU": f"{number(event, 'mfu'):.1%}",
    }
    busy = finite(number(event, "gpu_percent") for event in run.step_events())
    if busy:
        rows["GPU busy"] = f"{median(busy):.0f} % of the time (median)"
    return {name: text for name, text in rows.items() if not text.startswith("nan")}


def _weighted_mean(rates: list[_WeightedRate]) -> float:
    """Returns the weighted mean; NaN if no rate with its weight is known."""
    known = [one for one in rates if math.isfinite(one.rate) and math.isfinite(one.weight)]
    total = sum(one.weight for one in known)
    return sum(one.rate * one.weight for one in known) / total if total else math.nan


def last_value(run: RunRecord) -> float:
    """Returns value of the objective in the last evaluation; NaN without one."""
    name = objective_of(run).name
    return first_finite(*(number(event, f"val_{name}") for event in reversed(run.epoch_events())))


def best_value(run: RunRecord) -> float:
    """Returns the best value of the objective in all evaluations; NaN without one."""
    objective = objective_of(run)
    evaluated = [number(event, f"val_{objective.name}") for event in run.epoch_events()]
    best = min if objective.lower_is_better else max
    return best(
        finite([number(run.end_event, f"best_{objective.name}"), *evaluated]), default=math.nan
    )


def epochs_done(run: RunRecord) -> float:
    steps = run.step_events()
    of_last_step = number(steps[-1], "epochs") if steps else math.nan
    of_evaluations = [
        first_finite(number(event, "epochs"), number(event, "epoch"))
        for event in reversed(run.epoch_events())
    ]
    return first_finite(number(run.end_event, "epochs"), of_last_step, *of_evaluations)


def job_seconds(run: RunRecord) -> float:
    """Returns the seconds up to the last event that has `seconds`; else up to the last event."""
    known = [
        number(event, "seconds") for event in run.events if event["kind"] not in ("target", "start")
    ]
    return first_finite(*reversed(known), run.seconds_at(run.last_of_job))


def joules_per_sample(run: RunRecord) -> float:
    """Joules per sample. For a job without an end, the mean over the epochs that measured the same
    hardware as the last one, weighted by samples."""
    of_job = number(run.end_event, "joules_per_sample")
    if math.isfinite(of_job):
        return of_job
    measured = [
        event for event in run.epoch_events() if math.isfinite(number(event, "joules_per_sample"))
    ]
    rates = []
    for event in measured:
        if measured_hardware(event) == measured_hardware(measured[-1]):
            samples = first_finite(number(event, "samples_per_s") * number(event, "epoch_s"), 1.0)
            rates.append(_WeightedRate(number(event, "joules_per_sample"), samples))
    return _weighted_mean(rates)


def measured_hardware(event: Fields) -> set[str] | None:
    """Returns the kinds of hardware (gpu, cpu) whose joules an event has; None if it does not name
    them."""
    joules = event.get("joules")
    if not isinstance(joules, dict) or (
        not joules and math.isfinite(number(event, "joules_per_sample"))
    ):
        return None
    return set(map(str, joules))


def energy_summary(run: RunRecord) -> str:
    """Summarizes joules per sample with the kind of hardware, or why they were not measured: 0.6 J
    (GPUs); not measured: processors: no counter"""
    # kind of hardware -> empty if it is measured, else why not
    energy = run.start_event.get("energy")
    if not isinstance(energy, dict):
        return "not recorded"
    lost = _lost_counters(run, set(energy))
    measured = []
    missing = []
    for kind, reason in energy.items():
        name = _ENERGY_NAMES.get(str(kind), str(kind))
        why = reason or lost.get(kind, "")
        if why:
            missing.append(f"{name}: {why}")
        else:
            measured.append(name)
    joules = joules_per_sample(run)
    if not math.isfinite(joules):
        return f"{NOT_MEASURED}{'; '.join(missing) or 'no epoch has ended'}"
    of = " and ".join(measured) or "of what was measured"
    return f"{joules:.3g} J ({of})" + (f"; {NOT_MEASURED}{'; '.join(missing)}" if missing else "")


def memory_of_largest_rank(run: RunRecord) -> str:
    """Returns the peak memory of the rank that uses the most: 612 MB, on a GPU 800 MB; empty if no
    step event has it."""
    parts = []
    for field, place in (("memory_mb", ""), ("gpu_memory_mb", "on a GPU ")):
        known = finite(number(event, field) for event in run.step_events())
        if known:
            parts.append(f"{place}{max(known):,.0f} MB")
    return ", ".join(parts)


def memory_summary(run: RunRecord) -> str:
    """Returns the memory of a rank without libraries and data, and the prediction for rank 0: 480
    MB, 421 predicted (+14.0%); empty if the end event does not have it. Less than 1 MB is not
    compared: it is mostly pages of the system."""
    ranks = numbers(run.end_event, "rank_memory_mb")
    predicted = number(run.end_event, "memory_predicted_mb")
    if not finite(ranks):
        return ""
    if max(finite(ranks)) < 1.0:
        return "less than 1 MB"
    most = f"{max(finite(ranks)):,.0f} MB"
    if not (predicted > 0 and math.isfinite(ranks[0])):
        return most
    return f"{most}, {predicted:,.0f} predicted ({ranks[0] / predicted - 1:+.1%} on rank 0)"


def _lost_counters(run: RunRecord, kinds: set[str]) -> dict[str, str]:
    """Returns kinds of hardware that the job's last energy figure no longer includes -> why."""
    newest_first = (run.end_event, *reversed(run.epoch_events()))
    included = next(
        (hardware for event in newest_first if (hardware := measured_hardware(event)) is not None),
        kinds,
    )
    why = (
        "a counter failed during the job"
        if len(run.events_of("start")) == 1
        else "not counted in every start of the job"
    )
    return dict.fromkeys(kinds - included, why)


def targets(run: RunRecord) -> list[ReachedTarget]:
    """Returns the targets, the easiest first, each at the first time it was reached."""
    reached: dict[float, ReachedTarget] = {}
    for event in run.events_of("target"):
        value = number(event, "target")
        target = ReachedTarget(
            value,
            run.seconds_at(event),
            number(event, "epochs"),
            number(event, "samples"),
            number(event, "joules"),
        )
        if math.isfinite(value):
            reached.setdefault(value, target)
    return [reached[value] for value in sorted(reached, reverse=objective_of(run).lower_is_better)]


def resumes(run: RunRecord) -> list[Fields]:
    """Returns the start events after the first: the job had stopped, ended or been killed."""
    return run.events_of("start")[1:]


def rank_work_ms(run: RunRecord) -> list[float]:
    """Returns each rank's own work in a step, the mean over the epochs with the last number of
    ranks; empty if no epoch has it."""
    rows = [row for event in run.epoch_events() if (row := numbers(event, "rank_work_ms"))]
    rows = [row for row in rows if len(row) == len(rows[-1])]  # a resumed job may have fewer ranks
    known = [finite(rank) for rank in zip(*rows, strict=True)]
    return [sum(epochs) / len(epochs) if epochs else math.nan for epochs in known]


def straggler(run: RunRecord) -> Straggler | None:
    """Returns the slowest rank; None for one rank, and if nothing was measured."""
    work_ms = rank_work_ms(run)
    known = finite(work_ms)
    if len(known) < 2:
        return None
    mesh = mesh_of(run)
    medians = median_of_stage(run, work_ms)
    measured = [rank for rank, ms in enumerate(work_ms) if math.isfinite(ms)]
    rank = max(
        measured,
        key=lambda rank: (work_ms[rank] / medians[rank] if medians[rank] else 1.0, work_ms[rank]),
    )
    place = mesh.name(rank) if mesh and rank < len(mesh.places) else ""
    return Straggler(rank, host_of(run.start_event, rank), work_ms[rank], medians[rank], place)


def median_of_stage(run: RunRecord, work_ms: Sequence[float]) -> list[float]:
    """Returns for each rank the median over the ranks that do the same work: over its stage, or
    over all."""
    mesh = mesh_of(run)
    if mesh is None or len(mesh.places) != len(work_ms):
        return [median(finite(work_ms))] * len(work_ms)
    medians = [
        median(finite(work_ms[rank] for rank in mesh.ranks_of(stage)) or [math.nan])
        for stage in range(mesh.sizes.stage)
    ]
    return [medians[place.stage] for place in mesh.places]


def host_of(start: Fields, rank: int) -> str:
    """Returns the host of a rank; empty if unknown."""
    hosts = start.get("host_of_rank")
    return str(hosts[rank]) if isinstance(hosts, list) and 0 <= rank < len(hosts) else ""


def straggler_summary(run: RunRecord) -> str:
    """Returns a sentence about the slowest rank, or that the ranks are even; empty for one rank,
    and if nothing was measured."""
    slowest = straggler(run)
    if not slowest:
        return ""
    host = (f" on {slowest.host}" if slowest.host else "") + (
        f" ({slowest.place})" if slowest.place else ""
    )
    among = " of its stage" if len(set(median_of_stage(run, rank_work_ms(run)))) > 1 else ""
    work = f"{slowest.work_ms:.3g} ms of own work a step, median"
    if not slowest.is_slow:
        return (
            f"the ranks are even: rank {slowest.rank}{host} has {work}{among} "
            f"{slowest.median_ms:.3g}"
        )
    return f"rank {slowest.rank}{host} is slowest{among}: {work} {slowest.median_ms:.3g}"


def duration(seconds: float) -> str:
    """1.42 s, 2.00 s, 3 min 20 s, 2 h 05 min; empty for NaN."""
    if not math.isfinite(seconds):
        return ""
    if seconds < 59.95:  # above, .3g rounds to 60
        return f"{seconds:#.3g} s"
    if seconds < 60:
        return "1 min 00 s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60:,} h {minutes % 60:02d} min"
    )


def labels(runs: Sequence[RunRecord]) -> list[str]:
    """Returns a short name for each run: the part of its path in which it differs from the
    others."""
    paths = [run.folder.absolute().parts for run in runs]
    if len(paths) == 1:
        return [shortened(paths[0][-1])]
    head = common_prefix(paths)
    tail = common_prefix([path[:head:-1] for path in paths])
    names = ["/".join(path[head : len(path) - tail]) for path in paths]
    same_letters = names[0][: common_prefix(names)]
    cut = max(same_letters.rfind(separator) for separator in "-_/ ") + 1  # whole words only
    names = [
        shortened(name[cut:] or name or "/".join(path))
        for name, path in zip(names, paths, strict=True)
    ]
    if len(set(names)) == len(names):
        return names
    return [f"{index}: {name}" for index, name in enumerate(names, start=1)]


def common_prefix(sequences: Sequence[Sequence[str]]) -> int:
    """Returns the number of leading elements that are equal."""
    length = 0
    for elements in zip(*sequences, strict=False):
        if len(set(elements)) > 1:
            break
        length += 1
    return length


def shortened(name: str) -> str:
    """Returns at most LONGEST_LABEL printable characters."""
    name = "".join(letter if letter.isprintable() else "?" for letter in name)
    return (
        name
        if len(name) <= LONGEST_LABEL
        else f"{name[: LONGEST_LABEL // 2]}...{name[-LONGEST_LABEL // 2 + 3 :]}"
    )


class WorldSize(NamedTuple):
    """The number of ranks from one start of a run on."""

    step: int
    seconds: float  # since its first event
    ranks: float  # NaN if the event does not have it
    hosts: list[Any]
    why: str


def world_sizes(run: RunRecord) -> list[WorldSize]:
    """Returns the changes of the number of ranks, in order; a single one if it never changed."""
    sizes: list[WorldSize] = []
    living: dict[int, Any] = {}  # host of each rank, by the launcher's rank numbers
    before: Mapping[str, Any] = {}
    for event in run.events:
        at = int(event["step"])
        seconds = max(0.0, event["time"] - run.events[0]["time"])
        if event["kind"] == "start":
            living = dict(enumerate(_list(event, "host_of_rank")))
            why = _why_started(before) if sizes else "started"
            sizes.append(WorldSize(at, seconds, number(event, "ranks"), _list(event, "hosts"), why))
        elif event["kind"] == "lost":
            lost = [rank for rank in _list(event, "ranks") if isinstance(rank, int)]
            living = {rank: host for rank, host in living.items() if rank not in lost}
            hosts = [
                host
                for index, host in enumerate(living.values())
                if host not in list(living.values())[:index]
            ]
            sizes.append(
                WorldSize(
                    at,
                    seconds,
                    number(event, "left"),
                    hosts,
                    f"{len(lost)} rank{'s' if len(lost) != 1 else ''} lost",
                )
            )
        if event["kind"] != "evaluation":  # days later, perhaps
            before = event
    return sizes


def _list(event: Mapping[str, Any], name: str) -> list[Any]:
    value = event.get(name)
    return value if isinstance(value, list) else []


def _why_started(before: Mapping[str, Any]) -> str:
    """Returns why a start happened. before: the last event of the previous start."""
    ended = {"stop": "stopped", "failed": "failed", "end": "ended"}.get(before["kind"])
    if ended is None:
        return "resumed after a kill or the loss of a host"
    reason = before.get("reason")
    return f"{ended} ({reason}), resumed" if isinstance(reason, str) else f"{ended}, resumed"
