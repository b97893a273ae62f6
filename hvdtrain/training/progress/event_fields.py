"""The fields of the events step, nonfinite and epoch that follow from the state of training (docs/events.md)."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.training.progress.train_state import TrainState


def step_fields(now: TrainState, sums: Sums, window_s: float) -> dict[str, Any]:
    """Of the steps since the last sync point: their sums over all ranks, and their seconds."""
    p = now.progress
    return {
        "epochs": p.epochs,
        "of": p.total // p.dataset,
        "loss": sums["loss"] / sums["count"],
        "accuracy": sums["right"] / sums["count"],
        "images_per_s": sums["count"] / window_s,
        "lr": now.lr,
        "batch": now.batch,
        "seconds": round(now.seconds, 3),
    }


def nonfinite_fields(config: Config, now: TrainState) -> dict[str, Any]:
    policy, count = config.guard.nonfinite, now.nonfinite
    line = f"step {now.progress.step}: a loss or gradient was not finite: {policy}, {count} in all"
    return {"policy": policy, "count": count, "lines": [line]}


def epoch_fields(config: Config, before: TrainState, now: TrainState, val: Sums, noise_scale: float) -> dict[str, Any]:
    """Of the epoch that was just evaluated: `before` has its sums of training, `now` the state after the evaluation."""
    trained = before.sums["count"]
    return {
        "epoch": before.epoch + 1,
        "seconds": round(now.seconds, 3),
        "epoch_s": round(before.epoch_s, 3),
        "images_per_s": round(trained / before.epoch_s, 1) if before.epoch_s else math.nan,
        "train_loss": before.sums["loss"] / trained if trained else math.nan,
        "train_accuracy": before.sums["right"] / trained if trained else math.nan,
        "val_loss": val["loss"] / val["count"],
        "val_accuracy": now.accuracy,
        "val_count": int(val["count"]),
        "best_accuracy": now.best,
        "lr": now.lr,
        "batch": now.batch,
        **({"noise_scale": noise_scale} if config.log.noise_scale else {}),
    }


def energy_fields(now: TrainState, kinds: Collection[str], wall_s: float) -> dict[str, Any]:
    """Of the event "epoch": what was used since the last evaluation, by the samples of `now.sums`."""
    joules = epoch_energy(now, kinds)
    if not joules or not wall_s:
        return {"joules": {}}
    total, trained = sum(joules.values()), now.sums["count"]
    per_image = {"joules_per_image": total / trained} if trained else {}
    return {"joules": joules, "wh": round(total / 3600, 4), "watts": round(total / wall_s, 2), **per_image}


def job_energy(now: TrainState, kinds: Collection[str]) -> dict[str, float]:
    """kind -> joules of the whole job, of the `kinds` that were measured all the time."""
    return _measured({"gpu": now.gpu_j, "cpu": now.cpu_j}, kinds)


def epoch_energy(now: TrainState, kinds: Collection[str]) -> dict[str, float]:
    """The same, since the last evaluation."""
    return _measured({"gpu": now.epoch_gpu_j, "cpu": now.epoch_cpu_j}, kinds)


def _measured(joules: dict[str, float], kinds: Collection[str]) -> dict[str, float]:
    return {kind: round(value, 3) for kind, value in joules.items() if kind in kinds and math.isfinite(value)}
