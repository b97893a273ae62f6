"""Decisions that all ranks make together at sync points."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hvdtrain.comm.communicator import Buffer, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.metrics import zero_sums
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.errors import Diverged
from hvdtrain.events.log import Log
from hvdtrain.training.build import build_learner
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import HealthMonitor, nonfinite_steps
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import make_job
from hvdtrain.training.loop import StepWindow, record
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.progress.triggers import evaluation_due, is_sync_point, stop_reason
from hvdtrain.training.start import begin

NO_FLAGS = {"stop.signal": 0.0, "stop.time": 0.0, "save": 0.0}
NOW = TrainState(Progress(100, 1000, 7, 70))


class PastDeadline:
    """A deadline that has come."""

    reason = "guard.max_time=1h"

    def __init__(self) -> None:
        self.calls: list[tuple[float, float]] = []

    def near(self, longest_s: float, save_s: float) -> bool:
        self.calls.append((longest_s, save_s))
        return True


class FakeCheckpoints:
    """Checkpoints that are never due; counts rollbacks."""

    def __init__(self, longest_s: float = 0.0) -> None:
        self.longest_s = longest_s
        self.rollbacks = 0

    def due(self, step: int) -> bool:
        return False

    def roll_back(self) -> None:
        self.rollbacks += 1


def monitor(*arguments: str, checkpoints: Any = None) -> HealthMonitor:
    guard = configure(None, arguments).guard
    return HealthMonitor(
        guard,
        SingleProcessCommunicator(),
        Signals(0),
        Heartbeat(),
        ["here"],
        checkpoints or FakeCheckpoints(),
    )


def test_a_signal_on_any_rank_stops_all() -> None:
    one = monitor()
    other = monitor()
    one.signals.received = "SIGUSR2"
    assert one.flags() == NO_FLAGS | {"stop.signal": 1.0}
    assert other.flags() == NO_FLAGS
    together = {name: one.flags()[name] + other.flags()[name] for name in NO_FLAGS}
    one.after_sync(together)
    other.after_sync(together)
    assert (one.stop_request, other.stop_request) == ("SIGUSR2", "a signal on another rank")
    assert one.heartbeat.limit == "stall_s"


def test_the_deadline_gets_the_longest_interval_and_the_longest_save() -> None:
    here = monitor(checkpoints=FakeCheckpoints(longest_s=2.0))
    here.after_sync(NO_FLAGS)
    assert here.updated_s is not None
    here.updated_s -= 1e4
    here.after_sync(NO_FLAGS)
    here.after_sync(NO_FLAGS)
    assert 1e4 <= here.longest_s < 2e4
    here.deadline = past = PastDeadline()  # type: ignore[assignment]
    assert not here.stop_request
    longest_s = here.longest_s
    assert here.agree_to_stop()
    assert past.calls == [(longest_s, 2.0)]
    assert here.stop_request == "guard.max_time=1h"


def test_steps_that_are_not_finite_are_counted_in_the_sums_of_all_ranks() -> None:
    assert nonfinite_steps({"nonfinite": 0.0, "loss": 1.0}) == 0
    assert nonfinite_steps({"nonfinite": 2.0, "loss": math.nan}) == 2
    assert nonfinite_steps({"nonfinite": 1.0, "loss": 1.0}) == 1, "a gradient"
    assert nonfinite_steps({"nonfinite": 0.0, "loss": math.inf}) == 1, (
        "a sum of losses that overflows"
    )


def test_guard_nonfinite_stops_skips_or_rolls_back_up_to_its_limit() -> None:
    with pytest.raises(
        Diverged, match="2 of the steps up to 7 had a loss or gradient that is not finite"
    ) as caught:
        monitor("guard.nonfinite=stop").handle_nonfinite(NOW, 2)
    assert caught.value.where == "guard.nonfinite=stop"
    checkpoints = FakeCheckpoints()
    skip = monitor("guard.nonfinite=skip", "guard.nonfinite_limit=4", checkpoints=checkpoints)
    now = skip.handle_nonfinite(NOW, 2)
    assert now.nonfinite == 2
    now = skip.handle_nonfinite(now, 2)
    assert now.nonfinite == 4
    with pytest.raises(Diverged, match=r"6 times in all, 4 are allowed \(guard.nonfinite_limit\)"):
        skip.handle_nonfinite(now, 2)
    assert checkpoints.rollbacks == 0
    back = monitor("guard.nonfinite=rollback", "guard.nonfinite_limit=1", checkpoints=checkpoints)
    now = back.handle_nonfinite(NOW, 2)
    assert (now.nonfinite, checkpoints.rollbacks) == (1, 1), "a rollback counts once"
    with pytest.raises(Diverged, match="2 times in all, 1 are allowed"):
        back.handle_nonfinite(now, 2)
    assert checkpoints.rollbacks == 1


class OfTwo(SingleProcessCommunicator):
    """Rank 0 of two, whose replicas differ."""

    size = 2

    def allgather(self, x: Buffer, name: str) -> Buffer:
        return np.concatenate([x, x + (name == "equal")])

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing, thing._replace(whole=thing.whole | {"p.fc.bias": 0})]


@pytest.mark.parametrize("save", [False, True])
def test_a_skipped_step_does_not_keep_the_ranks_from_being_compared(save: bool) -> None:
    """Every guard.equal_steps steps, and before a checkpoint, where the loss of the steps up to the
    sync point is not a number, too."""
    words = [
        "framework=numpy",
        "model.name=linear",
        "guard.nonfinite=skip",
        f"guard.equal_steps={1000 if save else 10}",
    ]
    config = configure(None, words)
    datasets = open_datasets(config)
    heartbeat = Heartbeat()
    learner = build_learner(config, datasets.task, SingleProcessCommunicator())
    before = begin(config, datasets)
    here = {
        "signals": Signals(0),
        "heartbeat": heartbeat,
        "log": Log([]),
        "start": before,
        "run": None,
    }
    job = make_job(config, datasets, SingleProcessCommunicator(), learner, **here)  # type: ignore[arg-type]
    job.health.communicator = OfTwo()
    job.health.hosts = ["n1", "n2"]
    sums = (
        zero_sums(job.task.sums)
        | job.health.flags(10)
        | job.telemetry.sync_sums()
        | {"over": 0.0}
        | {"loss": math.inf, "nonfinite": 1.0, "save": float(save)}
    )
    window = StepWindow(
        replace(before.progress, step=10, samples=640), Hyper(0.1, 0.9, 0.0, 64, 9), sums, 0.0
    )
    with pytest.raises(Diverged, match="ranks differ after step 10: p.fc.bias"):
        record(job, before, window, sums, 1.0)
    job.prefetcher.close()


def test_sync_points_follow_from_the_configuration_and_the_step() -> None:
    config = configure(None, ["log.every_steps=4", "checkpoint.every_steps=6", "max_steps=21"])
    before = TrainState(Progress(1000, 9000))
    sync_points = [
        step
        for step in range(1, 30)
        if is_sync_point(config, before, Progress(1000, 9000, step, step))
    ]
    assert sync_points == [4, 6, 8, 12, 16, 18, 20, 21, 24, 28]
    assert is_sync_point(config, before, Progress(1000, 9000, 5, 1000)), "the end of an epoch"
    assert not is_sync_point(
        config, TrainState(Progress(1000, 9000), epoch=1), Progress(1000, 9000, 5, 1000)
    )


def test_an_evaluation_is_due_until_it_is_done_and_a_job_is_not_over_before() -> None:
    config = configure(None, ["epochs=2"])
    end = Progress(10, 20, 5, 20)
    one = TrainState(end, epoch=1, evaluated=3)
    two = TrainState(end, epoch=2, evaluated=5)
    assert (evaluation_due(config, one), stop_reason(config, one)) == (True, "")
    assert (evaluation_due(config, two), stop_reason(config, two)) == (False, "epochs=2")
    assert not evaluation_due(config, TrainState(Progress(10, 20, 4, 16), epoch=1, evaluated=3))
