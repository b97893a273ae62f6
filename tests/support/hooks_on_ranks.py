"""Hooks of tests, and jobs that have them, on the ranks of this start."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ranks import HIGHEST_STAGE

import hvdtrain

JOB = (
    "model.name=linear epochs=3 batch.size=60 batch.evaluate=90 optim.base_lr=0.1 "
    "speed.precision=fp64 log.every_steps=7 log.display=lines"
)


class Recorder(hvdtrain.Hook):
    """Keeps what it was called with; its state is how often after which step."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.steps: list[int] = []

    def on_start(self, training: Any) -> None:
        self.calls.append(("start", training.step, list(self.steps)))

    def after_step(self, training: Any) -> None:
        self.steps.append(training.step)
        training.log(
            weight=training.model.fc.weight.detach().square().sum(),
            my_rank=training.rank,
            own_loss=training.loss,
            step=training.step,
        )

    def after_evaluation(self, training: Any, metrics: Mapping[str, float]) -> None:
        self.calls.append(("evaluation", training.step, dict(metrics)))
        training.log(error=1 - metrics["accuracy"])

    def before_checkpoint(self, training: Any) -> None:
        self.calls.append(("checkpoint", training.step))

    def on_end(self, training: Any) -> None:
        self.calls.append(("end", training.step))

    def state_dict(self) -> Any:
        return {"steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.steps = state["steps"]


class OfRank0(hvdtrain.Hook):
    """Logs on rank 0 alone."""

    on_rank_0_only = True

    def after_step(self, training: Any) -> None:
        training.log(of_rank_0=10 + training.rank)


class Ends(hvdtrain.Hook):
    """The last rank asks for the end after step 9."""

    def after_step(self, training: Any) -> None:
        if training.step == 9 and training.rank == training.size - 1:
            training.stop("nine steps are enough")


class Kills(hvdtrain.Hook):
    """Ends the process of rank 0 after step 12."""

    def after_step(self, training: Any) -> None:
        if training.step == 12 and training.size == 3 and training.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)


class Gathers(hvdtrain.Hook):
    """Compares training.weights() with the model, and writes them at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_end(self, training: Any) -> None:
        found = training.weights()
        if training.rank == 0:
            self.path.write_text(
                json.dumps({name: np.asarray(array).tolist() for name, array in found.items()})
            )


def jobs(folder: str, engine: str) -> None:
    """One after the other: stopped and resumed, ended by a hook, and with weights that ranks have
    in parts."""
    words, whole = [*JOB.split(), f"comm.engine={engine}"], Path(folder)
    for steps in (10, 1000):
        recorder = Recorder()
        hvdtrain.train(
            {"run": str(whole / "resumed"), "stop.steps": steps},
            *words,
            hooks=[recorder, OfRank0()],
        )
    run = hvdtrain.train({"run": str(whole / "ended")}, *words, hooks=[Ends()])
    assert (run.code, run.why, run.steps) == (0, "hook Ends: nine steps are enough", 14), run
    hvdtrain.train(
        {"run": str(whole / "parts"), "epochs": 1},
        *words,
        HIGHEST_STAGE,
        hooks=[Gathers(whole / "weights.json")],
    )
    if run.rank:
        (whole / "recorder.json").write_text(json.dumps(recorder.steps))


def job_that_loses_a_rank(folder: str) -> None:
    """Runs a job on three ranks; two of them continue."""
    recorder = Recorder()
    words = [*JOB.split(), "comm.engine=mpi", "guard.lost=shrink"]
    run = hvdtrain.train(
        {"run": str(Path(folder) / "shrunk"), "epochs": 1}, *words, hooks=[recorder, Kills()]
    )
    assert recorder.steps == list(range(1, run.steps + 1)), recorder.steps
