"""When the loop meets, evaluates and ends, as pure functions of progress; and what its events say."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Progress
from hvdtrain.train.progress.train_state import Reached, TrainState

ASK_EVERY = 4  # batches of an evaluation between two questions whether to stop: each costs one small allreduce


def is_sync_point(config: Config, before: TrainState, p: Progress) -> bool:
    """Whether all ranks meet after the step that led to p: a resumed job meets where a straight one does."""
    every = (config.log.every_steps, config.checkpoint.every_steps)
    return any(k and p.step % k == 0 for k in every) or p.epoch > before.epoch or p.step == config.max_steps


def evaluation_due(config: Config, now: TrainState) -> bool:
    p = now.progress
    return p.step > now.evaluated and (p.epoch > now.epoch or (config.max_steps is not None and p.step >= config.max_steps))


def stop_reason(config: Config, now: TrainState) -> str:
    """Why the job is over; empty while it is not. Equal on all ranks, since all that it reads is."""
    target = config.stop.target_accuracy
    if evaluation_due(config, now):
        return ""
    if target is not None and now.at_target >= config.stop.patience:
        return f"stop.target_accuracy={target:g} held for {now.at_target} epoch{'s' * (now.at_target > 1)}"
    if config.max_steps is not None and now.progress.step >= config.max_steps:
        return f"max_steps={config.max_steps}"
    return f"epochs={now.progress.total // now.progress.dataset}" if now.progress.done else ""


def step_fields(now: TrainState, sums: Sums, window_s: float) -> dict[str, Any]:
    """Of the steps since the last meeting, over all ranks, which took window_s."""
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
    """Of the epoch that was just evaluated; `before` has its sums, `now` the judgement."""
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


def judge(config: Config, now: TrainState, val: Sums, seconds: float, kinds: Collection[str]) -> tuple[TrainState, list[Reached]]:
    """The standing after an evaluation, and the accuracies that were reached by it for the first time; `kinds` of energy are measured.

    What is asked for since a resume, and was reached before, is not told: nobody knows when.
    """
    done = replace(now.after_evaluation(val["right"] / val["count"], config.stop.target_accuracy), seconds=seconds, evaluated_s=seconds)
    wanted = {*config.log.targets, config.stop.target_accuracy} - {None} - {past.target for past in now.reached}
    p, joules = done.progress, sum(energy_of(done, kinds).values()) if energy_of(done, kinds) else None
    new = [
        Reached(target, done.accuracy, round(seconds, 3), p.epochs, p.samples, joules)
        for target in sorted(target for target in wanted if target is not None and done.accuracy >= target and not now.best >= target)
    ]
    return replace(done, reached=(*done.reached, *new)), new


def energy_of(now: TrainState, kinds: Collection[str], *, epoch: bool = False) -> dict[str, float]:
    """Joules of each kind that was measured all the time: of the job, or of the time since the last evaluation."""
    known = {"gpu": now.epoch_gpu_j if epoch else now.gpu_j, "cpu": now.epoch_cpu_j if epoch else now.cpu_j}
    return {kind: round(joules, 3) for kind, joules in known.items() if kind in kinds and math.isfinite(joules)}


def energy_fields(now: TrainState, kinds: Collection[str], wall_s: float) -> dict[str, Any]:
    """Of the event "epoch": what was used since the last evaluation, by the samples of `now.sums`."""
    joules = energy_of(now, kinds, epoch=True)
    if not joules or not wall_s:
        return {"joules": {}}
    whole, trained = sum(joules.values()), now.sums["count"]
    more = {"joules_per_image": whole / trained} if trained else {}
    return {"joules": joules, "wh": round(whole / 3600, 4), "watts": round(whole / wall_s, 2), **more}
