"""The result of bench scaling: efficiency of each job, the fitted model with its errors,
predictions, and the curves of the picture."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdtrain.cli.output import align, plural
from hvdtrain.extras.bench.cost_model import ALGORITHMS, Cluster, StepModel, comm_s, step_s
from hvdtrain.extras.bench.options import format_bytes, format_seconds
from hvdtrain.extras.bench.scaling.figure import EfficiencyLine
from hvdtrain.extras.bench.trainer import quartiles
from hvdtrain.extras.plan.meshes.link import Link

SCALING_KINDS = ("weak", "strong")
PREDICTED_RANKS = [2**power for power in range(3, 14)]


class ScalingTrial(NamedTuple):
    """One job."""

    # weak: constant samples per rank; strong: constant samples per step; alone: one rank with its
    # share of a strong step
    kind: str
    ranks: int
    batch: int  # samples of a step
    seconds: list[float]  # seconds of a step


class Study(NamedTuple):
    """All measurements and the fitted model."""

    trials: list[ScalingTrial]
    model: StepModel
    step_errors: list[float]  # relative error of each step, predicted from the others
    link: Link  # measured here
    link_errors: list[float]  # relative error of each allreduce, predicted from the others
    cluster: Cluster  # to predict for
    buckets: list[float]  # bytes
    cores: int
    threads: str  # OMP_NUM_THREADS


class Prediction(NamedTuple):
    kind: str
    algorithm: str
    ranks: int
    step_s: float
    efficiency: float  # compared with one rank


class CurveFigure(NamedTuple):
    """The title and the lines of the picture."""

    title: str
    lines: list[EfficiencyLine]


def efficiency(trial: ScalingTrial, trials: Sequence[ScalingTrial]) -> float:
    """Returns images per second and rank, relative to the trial of the same kind with the fewest
    ranks."""
    return _samples_per_s_and_rank(trial) / _samples_per_s_and_rank(
        _trial_with_fewest_ranks(trials, trial.kind)
    )


def _samples_per_s_and_rank(trial: ScalingTrial) -> float:
    return trial.batch / quartiles(trial.seconds).median / trial.ranks


def _trial_with_fewest_ranks(trials: Sequence[ScalingTrial], kind: str) -> ScalingTrial:
    return min((trial for trial in trials if trial.kind == kind), key=lambda trial: trial.ranks)


def predictions(study: Study, rank_counts: Sequence[int] = PREDICTED_RANKS) -> list[Prediction]:
    """Returns predictions for each measured kind of scaling and each algorithm, if each rank has a
    sample. Assumes separate cores for every rank."""
    predicted = []
    for kind in _measured_kinds(study):
        first = _trial_with_fewest_ranks(study.trials, kind)
        for algorithm in ALGORITHMS:
            for ranks in rank_counts:
                samples = first.batch / (first.ranks if kind == "weak" else ranks)
                if samples < 1:
                    continue
                seconds = step_s(
                    study.model, samples, comm_s(algorithm, ranks, study.buckets, study.cluster)
                )
                if kind == "weak":
                    ideal_s = study.model.compute_s(samples, alone=True)
                else:
                    ideal_s = study.model.compute_s(first.batch, alone=True) / ranks
                predicted.append(Prediction(kind, algorithm, ranks, seconds, ideal_s / seconds))
    return predicted


def _measured_kinds(study: Study) -> list[str]:
    return [kind for kind in SCALING_KINDS if any(trial.kind == kind for trial in study.trials)]


def to_text(study: Study) -> list[str]:
    """Formats the report as text."""
    return [*_measurements(study), "", *_model(study), "", *_prediction_tables(study)]


def _measurements(study: Study) -> list[str]:
    rows = [("", "ranks", "batch", "intervals", "step", "quartiles", "images/s", "efficiency", "")]
    for trial in study.trials:
        low, median, high = quartiles(trial.seconds)
        rows.append(
            (
                trial.kind,
                str(trial.ranks),
                str(trial.batch),
                str(len(trial.seconds)),
                format_seconds(median),
                f"{format_seconds(low)} .. {format_seconds(high)}",
                f"{trial.batch / median:,.0f}",
                f"{efficiency(trial, study.trials):.1%}",
                f"oversubscribed: {trial.ranks} ranks on {study.cores} cores"
                if trial.ranks > study.cores
                else "",
            )
        )
    return [
        f"hvdtrain bench scaling: real jobs, {study.cores} cores here, "
        f"OMP_NUM_THREADS={study.threads}; "
        "median over the intervals between sync points",
        "",
        *align(rows, left=(0, 1)),
        *_oversubscription_warning(study),
    ]


def _oversubscription_warning(study: Study) -> list[str]:
    if all(trial.ranks <= study.cores for trial in study.trials):
        return []
    return [
        "OVERSUBSCRIBED ranks share a core: their efficiency is at most cores / ranks, and says "
        "nothing about a cluster"
    ]


def _model(study: Study) -> list[str]:
    model = study.model
    link = study.link
    gradients = f"{format_bytes(int(sum(study.buckets)))} in {plural(len(study.buckets), 'bucket')}"
    return [
        f"model   a step of s samples a rank takes {format_seconds(model.fixed_s)} + s x "
        f"{format_seconds(model.per_sample_s)};"
        f" beside other ranks {1 + model.contention:.2f} x as long,",
        f"        plus {model.exposed:.2f} x the communication of {gradients}",
        f"link    {_link_text(link)}",
        *_latency_warning(link),
        _errors_line("steps", study.step_errors),
        _errors_line("allreduces", study.link_errors),
    ]


def _latency_warning(link: Link) -> list[str]:
    """Returns a warning if times are so noisy that the fitted latency would be negative."""
    if link.latency_s or math.isinf(link.bytes_per_s):
        return []
    return [
        "        too noisy for a latency, which counts as 0: many ranks look better than they "
        "are; measure on an idle machine"
    ]


def _errors_line(what: str, errors: Sequence[float]) -> str:
    """Returns the size of the errors, with n."""
    if not errors:
        return f"error   {what}: unknown, there are too few points to leave one out"
    sizes = [abs(error) for error in errors]
    return (
        f"error   {what} left out of the fit: median {statistics.median(sizes):.1%}, largest "
        f"{max(sizes):.1%}, n = {len(sizes)}"
    )


def _prediction_tables(study: Study) -> list[str]:
    """Returns a table for each kind of scaling: a row for each number of ranks, a column for each
    algorithm."""
    cluster = study.cluster
    predicted = predictions(study)
    lines = [
        f"predicted with {_link_text(cluster.inside)} inside a node, "
        f"{_link_text(cluster.between)} between nodes, "
        f"{cluster.per_node} ranks a node; each rank has its own cores, slowed down by other "
        "ranks as here: "
        "efficiency compared with one rank, and the step"
    ]
    for kind in _measured_kinds(study):
        rows = [(kind, "ranks", *ALGORITHMS)]
        for ranks in PREDICTED_RANKS:
            cells = [
                f"{prediction.efficiency:6.1%} {format_seconds(prediction.step_s):>8}"
                for prediction in predicted
                if prediction.ranks == ranks and prediction.kind == kind
            ]
            if cells:
                rows.append(("", str(ranks), *cells))
        lines += ["", *align(rows, left=(0, 1))]
    return lines


def _link_text(link: Link) -> str:
    return f"{link.name} {format_seconds(link.latency_s)}, {link.bytes_per_s / 1e9:.3g} GB/s"


def to_json(study: Study) -> dict[str, Any]:
    """Returns the report for programs, with the keys of the published benchmarks/scaling.json."""
    rows = []
    for trial in study.trials:
        low, median, high = quartiles(trial.seconds)
        rows.append(
            {
                **trial._asdict(),
                "quartiles_s": [low, median, high],
                "samples_per_s": trial.batch / median,
                "efficiency": efficiency(trial, study.trials),
                "oversubscribed": trial.ranks > study.cores,
            }
        )
    return {
        "cores": study.cores,
        "omp_num_threads": study.threads,
        "trials": rows,
        "model": {
            "fixed_s": study.model.fixed_s,
            "per_sample_s": study.model.per_sample_s,
            "shared": study.model.contention,
            "exposed": study.model.exposed,
        },
        "link": study.link._asdict(),
        "step_errors": study.step_errors,
        "link_errors": study.link_errors,
        "fleet": {
            "inside": study.cluster.inside._asdict(),
            "between": study.cluster.between._asdict(),
            "per_node": study.cluster.per_node,
        },
        "buckets": study.buckets,
        "predictions": [prediction._asdict() for prediction in predictions(study)],
    }


def curves(study: Study, model: str) -> CurveFigure:
    """Returns the measured points and the prediction of each algorithm, for the figure."""
    predicted = predictions(study)
    lines = []
    for kind in _measured_kinds(study):
        trials = [trial for trial in study.trials if trial.kind == kind]
        efficiencies = [efficiency(trial, study.trials) for trial in trials]
        lines.append(
            EfficiencyLine(
                kind, "measured", [trial.ranks for trial in trials], efficiencies, measured=True
            )
        )
        for algorithm in ALGORITHMS:
            points = [
                prediction
                for prediction in predicted
                if prediction.kind == kind and prediction.algorithm == algorithm
            ]
            if points:
                efficiencies = [point.efficiency for point in points]
                lines.append(
                    EfficiencyLine(
                        kind,
                        algorithm,
                        [point.ranks for point in points],
                        efficiencies,
                        measured=False,
                    )
                )
    cluster = study.cluster
    title = (
        f"{model}: {_link_text(cluster.inside)} inside, {_link_text(cluster.between)} between "
        f"nodes of {cluster.per_node}"
    )
    return CurveFigure(title, lines)
