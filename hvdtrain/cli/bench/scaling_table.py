"""What bench scaling tells: a table of efficiency, the model that was fitted with its error, a table of predictions, two curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdtrain.cli.bench.predict import ALGORITHMS, Fleet, Link, Measured, StepModel, comm_s, step_s
from hvdtrain.cli.bench.tables import aligned, bytes_words, quartiles, time_words
from hvdtrain.report.figures.scaling_curve import Line

PREDICTED = [2**power for power in range(3, 14)]  # ranks


class Trial(NamedTuple):
    """One job."""

    kind: str  # weak: samples of a rank stay; strong: samples of a step do; alone: one rank, with the share of a strong one
    ranks: int
    batch: int  # samples of a step
    seconds: list[float]  # of a step


class Study(NamedTuple):
    """All that was measured and fitted."""

    trials: list[Trial]
    points: list[Measured]  # of the jobs
    model: StepModel
    step_errors: list[float]  # relative, of each trial predicted from the others
    link: Link
    link_errors: list[float]  # relative, of each allreduce predicted from the others
    fleet: Fleet  # to predict for
    buckets: list[float]  # bytes
    cores: int
    threads: str


class Prediction(NamedTuple):
    kind: str
    algorithm: str
    ranks: int
    step_s: float
    efficiency: float  # against one rank


def efficiency(trial: Trial, trials: Sequence[Trial]) -> float:
    """Images a second and rank, as a share of those on the fewest ranks of the same kind."""
    first = min((other for other in trials if other.kind == trial.kind), key=lambda other: other.ranks)
    return _each(trial) / _each(first)


def _each(trial: Trial) -> float:
    return trial.batch / quartiles(trial.seconds)[1] / trial.ranks


def predictions(study: Study, ranks: Sequence[int] = PREDICTED) -> list[Prediction]:
    """For each kind that was measured and each algorithm; none where a rank would have no sample. Every rank has cores of its own."""
    found = []
    for kind in _kinds(study):
        first = min((trial for trial in study.trials if trial.kind == kind), key=lambda trial: trial.ranks)
        for algorithm in ALGORITHMS:
            for n in ranks:
                samples = first.batch / (first.ranks if kind == "weak" else n)
                if samples < 1:
                    continue
                seconds = step_s(study.model, samples, comm_s(algorithm, n, study.buckets, study.fleet))
                alone = study.model.compute_s(samples if kind == "weak" else first.batch, alone=True) / (1 if kind == "weak" else n)
                found.append(Prediction(kind, algorithm, n, seconds, alone / seconds))
    return found


def _kinds(study: Study) -> list[str]:
    """Of scaling."""
    return [kind for kind in ("weak", "strong") if any(trial.kind == kind for trial in study.trials)]


def text(study: Study) -> list[str]:
    """Every line."""
    return [*_measured(study), "", *_model(study), "", *_predicted(study)]


def _measured(study: Study) -> list[str]:
    table = [("", "ranks", "batch", "meetings", "step", "quartiles", "images/s", "efficiency", "")]
    for trial in study.trials:
        low, middle, high = quartiles(trial.seconds)
        share = f"{efficiency(trial, study.trials):.1%}"
        crowd = f"oversubscribed: {trial.ranks} ranks on {study.cores} cores" if trial.ranks > study.cores else ""
        spread = f"{time_words(low)} .. {time_words(high)}"
        rate = f"{trial.batch / middle:,.0f}"
        row = (trial.kind, f"{trial.ranks}", f"{trial.batch}", f"{len(trial.seconds)}", time_words(middle), spread, rate, share, crowd)
        table.append(row)
    head = f"hvdtrain bench scaling: real jobs, {study.cores} cores here, OMP_NUM_THREADS={study.threads}"
    return [f"{head}; median over meetings after the first", "", *aligned(table), *_crowd_words(study)]


def _crowd_words(study: Study) -> list[str]:
    if all(trial.ranks <= study.cores for trial in study.trials):
        return []
    return ["OVERSUBSCRIBED ranks take turns on a core: their efficiency is at most cores / ranks, and says nothing about a cluster"]


def _model(study: Study) -> list[str]:
    model, link = study.model, study.link
    size = bytes_words(int(sum(study.buckets)))
    lines = [
        f"model   a step of s samples a rank takes {time_words(model.fixed_s)} + s x {time_words(model.per_sample_s)};"
        f" beside other ranks {1 + model.shared:.2f} x as long,",
        f"        and {model.exposed:.2f} x the communication of {size} in {len(study.buckets)} bucket{'s' * (len(study.buckets) > 1)}",
        f"link    {link.name}: {time_words(link.latency_s)}, {link.bytes_per_s / 1e9:.3g} GB/s",
    ]
    for what, errors in (("steps", study.step_errors), ("allreduces", study.link_errors)):
        if errors:
            lines.append(f"error   {what} left out of the fit: {error_words(errors)}")
        else:
            lines.append(f"error   {what}: not known, too few points to leave one out")
    return lines


def error_words(errors: Sequence[float]) -> str:
    """Their size, with n."""
    sizes = [abs(error) for error in errors]
    return f"median {statistics.median(sizes):.1%}, largest {max(sizes):.1%}, n = {len(sizes)}"


def _predicted(study: Study) -> list[str]:
    """A table for each kind: ranks down, algorithms across."""
    fleet, found = study.fleet, predictions(study)
    links = f"inside a node {_link_words(fleet.inside)}, between nodes {_link_words(fleet.between)}, {fleet.per_node} ranks a node"
    lines = [f"predicted with {links}; cores of its own for every rank, slowed by others as here: efficiency against one, and the step"]
    for kind in _kinds(study):
        table = [(kind, "ranks", *ALGORITHMS)]
        for n in PREDICTED:
            cells = [f"{row.efficiency:6.1%} {time_words(row.step_s):>8}" for row in found if (row.kind, row.ranks) == (kind, n)]
            if cells:
                table.append(("", f"{n}", *cells))
        lines += ["", *aligned(table)]
    return lines


def _link_words(link: Link) -> str:
    return f"{link.name} {time_words(link.latency_s)}, {link.bytes_per_s / 1e9:.3g} GB/s"


def tree(study: Study) -> dict[str, Any]:
    """The same for programs."""
    rows = []
    for trial in study.trials:
        low, middle, high = quartiles(trial.seconds)
        row = trial._asdict() | {"quartiles_s": [low, middle, high], "images_per_s": trial.batch / middle}
        rows.append(row | {"efficiency": efficiency(trial, study.trials), "oversubscribed": trial.ranks > study.cores})
    return {
        "cores": study.cores,
        "omp_num_threads": study.threads,
        "trials": rows,
        "model": study.model._asdict(),
        "link": study.link._asdict(),
        "step_errors": study.step_errors,
        "link_errors": study.link_errors,
        "fleet": {"inside": study.fleet.inside._asdict(), "between": study.fleet.between._asdict(), "per_node": study.fleet.per_node},
        "buckets": study.buckets,
        "predictions": [row._asdict() for row in predictions(study)],
    }


def curves(study: Study, model: str) -> tuple[str, list[Line]]:
    """The title of the picture, and its lines: what was measured, and each algorithm."""
    lines = []
    for kind in _kinds(study):
        mine = [trial for trial in study.trials if trial.kind == kind]
        shares = [efficiency(trial, study.trials) for trial in mine]
        lines.append(Line(kind, "measured", [trial.ranks for trial in mine], shares, measured=True))
        found = [row for row in predictions(study) if row.kind == kind]
        for algorithm in dict.fromkeys(row.algorithm for row in found):
            rows = [row for row in found if row.algorithm == algorithm]
            lines.append(Line(kind, algorithm, [row.ranks for row in rows], [row.efficiency for row in rows], measured=False))
    fleet = study.fleet
    return f"{model}: {_link_words(fleet.inside)} inside, {_link_words(fleet.between)} between nodes of {fleet.per_node}", lines
