"""The events of a custom loop, with the fields that reports, trackers and the terminal read
(docs/events.md)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.context.settings import described
from hvdtrain.context.stream import SampleStream
from hvdtrain.core.lengths import as_given
from hvdtrain.errors import DONE
from hvdtrain.events import redaction
from hvdtrain.events.log import Log
from hvdtrain.events.writers import OWN_LOOP
from hvdtrain.training.checkpoint.changes import PLACE, flat
from hvdtrain.training.header import fields_of_ranks, lines_of_ranks
from hvdtrain.training.lost import RankFailure, tell_loss
from hvdtrain.training.progress.train_state import TrainState


def start_fields(
    communicator: Communicator, hosts: list[str], model: str, stream: SampleStream
) -> dict[str, Any]:
    """Returns fields of the event "start" that do not change during the loop."""
    return {
        **fields_of_ranks(stream.config, communicator.name, hosts),
        "framework": stream.config.framework,
        "model": model,
        "samples": stream.order.dataset,
        "task": OWN_LOOP,
        "objective": "loss",
        "unit": "samples",
        "counts": "samples",
        "metrics": {"loss": {"better": "min", "column": "loss", "percent": False}},
        "resumed_from": None,
        "config": redaction.redact(
            flat(stream.config.model_dump(include=described(), exclude=set(PLACE)))
        ),
    }


def header(
    fields: dict[str, Any],
    reason: str,
    stream: SampleStream,
    run: Path | None,
    now: TrainState,
    notes: list[str],
) -> list[str]:
    """Returns the lines that describe what will run."""
    lines = [
        *lines_of_ranks(stream.config, fields["engine"], fields["host_of_rank"], reason),
        f"data    {stream.order.dataset:,} samples, {stream.order.sampling} sampling with seed "
        f"{stream.order.seed}",
        f"batch   {stream.batch} over all ranks, for {stream.total / stream.order.dataset:g} "
        "epochs",
        f"model   {fields['model']}",
        f"run     {run or 'nothing is written: no run='}",
    ]
    if now.progress.step:
        lines.append(f"resume  from step {now.progress.step}, epoch {now.progress.epochs:.2f}")
    return lines + [f"        {note}" for note in notes]


def step_fields(
    now: TrainState, means: dict[str, float], count: float, seconds: float
) -> dict[str, Any]:
    """Returns fields of the steps since the last sync point: the means of logged values in
    `logged`, and the loss as its own field."""
    p = now.progress
    return {
        "epochs": p.epochs,
        "of": as_given(p.total / p.dataset),
        "loss": means.get("loss", math.nan),
        "samples_per_s": count / seconds if seconds else math.nan,
        **_logged(now, means),
        "seconds": round(now.seconds, 3),
    }


def epoch_fields(
    now: TrainState, means: dict[str, float], count: float, seconds: float
) -> dict[str, Any]:
    """Returns fields of the epoch that has just ended, or the part of it since this start; val_NAME
    counts as the result of an evaluation, too."""
    p = now.progress
    return {
        "epoch": p.epoch,
        "epochs": p.epochs,
        "seconds": round(now.seconds, 3),
        "epoch_s": round(seconds, 3),
        "samples_per_s": round(count / seconds, 1) if seconds else math.nan,
        "train_loss": means.get("loss", math.nan),
        **{name: value for name, value in means.items() if name.startswith("val_")},
        **_logged(now, means),
    }


def _logged(now: TrainState, means: dict[str, float]) -> dict[str, Any]:
    """Returns the values that the script logged; its learning rate, if logged, replaces the
    event's."""
    return {
        "logged": {name: value for name, value in means.items() if name != "lr"},
        "lr": means.get("lr", now.lr),
        "batch": now.batch,
    }


def end_fields(
    now: TrainState, reason: str, code: int, run: Path | None, failure: str, keep_best: int
) -> dict[str, Any]:
    """Returns fields of the event "end" or "stop"; failure: why the last checkpoint was not
    written, or empty; keep_best: checkpoint.keep_best."""
    p = now.progress
    how = "done" if code == DONE else "stopped"
    lines = [f"{how} ({reason}) at step {p.step}, epoch {p.epochs:.2f}, after {now.seconds:.1f} s"]
    if failure:
        lines.append(f"no checkpoint of step {p.step}: {failure}")
    if not math.isnan(now.best):
        lines.append(f"best objective {now.best:.4g}, in epoch {now.best_epoch}")
    elif keep_best:
        lines.append(
            f"checkpoint.keep_best={keep_best} has kept none: no call was ctx.checkpoint(..., "
            "objective=value)"
        )
    if run is not None:
        lines.append(f"run folder: {run}")
    rate = p.samples / now.seconds if now.seconds else math.nan
    numbers = {
        "seconds": round(now.seconds, 3),
        "epochs": p.epochs,
        "samples": p.samples,
        "samples_per_s": round(rate, 1),
    }
    best = (
        {} if math.isnan(now.best) else {"best_objective": now.best, "best_epoch": now.best_epoch}
    )
    return {"reason": reason, "exit_code": code, "lines": lines, **numbers, **best}


def emit_loss(log: Log, loss: RankFailure, now: TrainState, left: int) -> None:
    """Emits the event "lost" of a loop that continues after a loss. left: the number of surviving
    ranks."""
    step = now.progress.step
    place = (
        f"step {step}, the newest checkpoint" if step else "the beginning: there is no checkpoint"
    )
    tell_loss(log, loss, now, step, left, f"{left} continue from {place}")
