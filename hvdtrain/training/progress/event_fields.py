"""The fields of the events step, nonfinite and epoch that follow from the state of training
(docs/events.md)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import as_given
from hvdtrain.core.metrics import Sums
from hvdtrain.tasks.task import Task
from hvdtrain.training.progress.train_state import Reached, TrainState


def step_fields(
    task: Task, now: TrainState, sums: Sums, window_s: float, epochs: float
) -> dict[str, Any]:
    """Returns fields of the steps since the last sync point, from their sums over all ranks and
    their seconds. epochs: of the job."""
    p = now.progress
    return {
        "epochs": p.epochs,
        "of": as_given(epochs) if epochs < math.inf else None,
        **{metric.name: metric.of(sums) for metric in task.metrics},
        "samples_per_s": sums["count"] / window_s,
        **({"tokens_per_s": sums["tokens"] / window_s} if "tokens" in task.sums else {}),
        "lr": now.lr,
        "batch": now.batch,
        "seconds": round(now.seconds, 3),
    }


def _rate(count: Any, seconds: float) -> float:
    return round(count / seconds, 1) if seconds else math.nan


def nonfinite_fields(config: Config, now: TrainState) -> dict[str, Any]:
    policy = config.guard.nonfinite
    count = now.nonfinite
    line = f"step {now.progress.step}: a loss or gradient was not finite: {policy}, {count} in all"
    return {"policy": policy, "count": count, "lines": [line]}


def epoch_fields(task: Task, before: TrainState, now: TrainState, val: Sums) -> dict[str, Any]:
    """Returns fields of an evaluation. before: the state with the training sums since the last
    evaluation; now: the state after it.

    The epoch is the one that contains or ends with the evaluation, counted from 1.
    """
    trained = before.trained_samples
    return {
        "epoch": before.epoch + 1,
        "epochs": before.progress.epochs,
        "seconds": round(now.seconds, 3),
        "epoch_s": round(before.epoch_s, 3),
        "samples_per_s": _rate(trained, before.epoch_s),
        **(
            {"tokens_per_s": _rate(before.sums["tokens"], before.epoch_s)}
            if "tokens" in task.sums
            else {}
        ),
        **{
            f"train_{metric.name}": metric.of(before.sums) if trained else math.nan
            for metric in task.metrics
        },
        **{f"val_{metric.name}": metric.of(val) for metric in task.metrics},
        "val_count": int(val[task.counted]),  # the divisor of its metrics
        f"best_{now.objective}": now.best,
        "lr": now.lr,
        "batch": now.batch,
    }


def target_fields(reached: Reached, objective: str) -> dict[str, Any]:
    """Returns fields of a target that an evaluation was the first to reach."""
    fields = reached._asdict()
    return {
        "target": fields.pop("target"),
        f"val_{objective}": fields.pop("value"),
        "samples": fields.pop("images"),
        **fields,
    }


def energy_fields(now: TrainState, kinds: Collection[str], wall_s: float) -> dict[str, Any]:
    """Returns the energy fields of the event "epoch": the energy since the last evaluation, divided
    by the samples of `now.sums`."""
    joules = epoch_energy(now, kinds)
    if not joules or not wall_s:
        return {"joules": {}}
    total = sum(joules.values())
    trained = now.trained_samples
    per_image = {"joules_per_sample": total / trained} if trained else {}
    return {
        "joules": joules,
        "wh": round(total / 3600, 4),
        "watts": round(total / wall_s, 2),
        **per_image,
    }


def job_energy(now: TrainState, kinds: Collection[str]) -> dict[str, float]:
    """Returns kind -> joules of the whole job, for the `kinds` that were measured throughout."""
    return _measured({"gpu": now.gpu_j, "cpu": now.cpu_j}, kinds)


def epoch_energy(now: TrainState, kinds: Collection[str]) -> dict[str, float]:
    """Joules by kind since the last evaluation."""
    return _measured({"gpu": now.epoch_gpu_j, "cpu": now.epoch_cpu_j}, kinds)


def _measured(joules: dict[str, float], kinds: Collection[str]) -> dict[str, float]:
    return {
        kind: round(value, 3)
        for kind, value in joules.items()
        if kind in kinds and math.isfinite(value)
    }
