"""When the loop meets, evaluates and ends, as pure functions of progress; and what its events say."""

from __future__ import annotations

import math
from typing import Any

from hvdtrain.config import Config
from hvdtrain.run.standing import Standing
from hvdtrain.state import Hyper, Progress, Sums

ASK_EVERY = 4  # batches of an evaluation between two questions whether to stop: each costs one small allreduce


def meets(config: Config, before: Standing, p: Progress) -> bool:
    """Whether all ranks meet after the step that led to p: a resumed job meets where a straight one does."""
    every = (config.log.every_steps, config.checkpoint.every_steps)
    return any(k and p.step % k == 0 for k in every) or p.epoch > before.epoch or p.step == config.max_steps


def evaluation_due(config: Config, now: Standing) -> bool:
    p = now.progress
    return p.step > now.evaluated and (p.epoch > now.epoch or (config.max_steps is not None and p.step >= config.max_steps))


def stop_reason(config: Config, now: Standing) -> str:
    """Why the job is over; empty while it is not. Equal on all ranks, since all that it reads is."""
    target = config.stop.target_accuracy
    if evaluation_due(config, now):
        return ""
    if target is not None and now.at_target >= config.stop.patience:
        return f"stop.target_accuracy={target:g} held for {now.at_target} epoch{'s' * (now.at_target > 1)}"
    if config.max_steps is not None and now.progress.step >= config.max_steps:
        return f"max_steps={config.max_steps}"
    return f"epochs={now.progress.total // now.progress.dataset}" if now.progress.done else ""


def step_fields(p: Progress, last: Hyper, sums: Sums, seconds: float) -> dict[str, Any]:
    """Of the steps since the last meeting, over all ranks."""
    loss, images_per_s = sums["loss"] / sums["count"], sums["count"] / seconds
    return {"epochs": p.epochs, "of": p.total // p.dataset, "loss": loss, "images_per_s": images_per_s, "lr": last.lr, "batch": last.batch}


def nonfinite_fields(config: Config, now: Standing) -> dict[str, Any]:
    policy, count = config.guard.nonfinite, now.nonfinite
    line = f"step {now.progress.step}: a loss or gradient was not finite: {policy}, {count} in all"
    return {"policy": policy, "count": count, "lines": [line]}


def epoch_fields(config: Config, before: Standing, now: Standing, val: Sums, noise_scale: float) -> dict[str, Any]:
    """Of the epoch that was just evaluated; `before` has its sums, `now` the judgement."""
    trained = before.sums["count"]
    return {
        "epoch": before.epoch + 1,
        "seconds": round(now.seconds, 3),
        "epoch_s": round(before.epoch_s, 3),
        "images_per_s": round(trained / before.epoch_s, 1) if before.epoch_s else math.nan,
        "train_loss": before.sums["loss"] / trained if trained else math.nan,
        "val_loss": val["loss"] / val["count"],
        "val_accuracy": now.accuracy,
        "val_count": int(val["count"]),
        "lr": now.lr,
        "batch": now.batch,
        **({"noise_scale": noise_scale} if config.log.noise_scale else {}),
    }
