"""What all ranks decide alike where they meet."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace

import pytest

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Progress
from hvdtrain.errors import Diverged
from hvdtrain.train.health.heartbeat import Heartbeat
from hvdtrain.train.health.monitor import HealthMonitor
from hvdtrain.train.health.signals import Signals
from hvdtrain.train.progress.train_state import TrainState
from hvdtrain.train.progress.triggers import evaluation_due, is_sync_point, stop_reason

QUIET = {"stop.signal": 0.0, "stop.time": 0.0, "save": 0.0}
NOW = TrainState(Progress(100, 1000, 7, 70))


class Late:
    """A deadline that has come."""

    words = "guard.max_time=1h"

    def __init__(self) -> None:
        self.asked: list[tuple[float, float]] = []

    def near(self, longest_s: float, save_s: float) -> bool:
        self.asked.append((longest_s, save_s))
        return True


def health(*words: str) -> HealthMonitor:
    return HealthMonitor(configure(None, words)[0], SingleProcessCommunicator(), Signals(0), Heartbeat(), ["here"])


def test_a_signal_on_any_rank_stops_all() -> None:
    one, other = health(), health()
    one.signals.heard = "SIGUSR2"
    assert one.flags() == QUIET | {"stop.signal": 1.0}
    assert other.flags() == QUIET
    together = {name: one.flags()[name] + other.flags()[name] for name in QUIET}
    one.after_sync(together)
    other.after_sync(together)
    assert (one.stop, other.stop) == ("SIGUSR2", "a signal on another rank")
    assert not one.heartbeat.patient


def test_the_time_limit_knows_how_long_the_job_takes_to_stop() -> None:
    here = health()
    here.after_sync(QUIET)
    time.sleep(0.3)
    here.after_sync(QUIET)
    here.after_sync(QUIET)
    assert 0.3 <= here.longest_s < 3
    here.saver = SimpleNamespace(longest_s=2.0)  # type: ignore[assignment]
    here.deadline = late = Late()  # type: ignore[assignment]
    assert not here.stop
    longest_s = here.longest_s
    assert here.ask()
    assert late.asked == [(longest_s, 2.0)]
    assert here.stop == "guard.max_time=1h"


def test_bad_numbers_stop_are_counted_or_are_too_many() -> None:
    fine, bad = {"nonfinite": 0.0, "loss": 1.0}, {"nonfinite": 2.0, "loss": math.nan}
    for words in (["guard.nonfinite=stop"], ["guard.nonfinite=skip"]):
        assert health(*words).is_finite(NOW, fine)
    with pytest.raises(Diverged, match="2 of the steps up to 7 had a loss or gradient that is not finite") as caught:
        health().is_finite(NOW, bad)
    assert caught.value.where == "guard.nonfinite=stop"
    skip, back = (health(f"guard.nonfinite={policy}", "guard.nonfinite_limit=4") for policy in ("skip", "rollback"))
    now = NOW
    for expected in (2, 4):
        assert not skip.is_finite(now, bad)
        now = skip.counted(now, bad)
        assert now.nonfinite == expected
    with pytest.raises(Diverged, match=r"6 times in all, 4 are allowed \(guard.nonfinite_limit\)"):
        skip.is_finite(now, bad)
    assert back.counted(NOW, bad).nonfinite == 1
    assert not health("guard.nonfinite=skip").is_finite(NOW, {"nonfinite": 0.0, "loss": math.inf})


def test_ranks_meet_at_steps_that_the_configuration_alone_says() -> None:
    config = configure(None, ["log.every_steps=4", "checkpoint.every_steps=6", "max_steps=21"])[0]
    before = TrainState(Progress(1000, 9000))
    met = [step for step in range(1, 30) if is_sync_point(config, before, Progress(1000, 9000, step, step))]
    assert met == [4, 6, 8, 12, 16, 18, 20, 21, 24, 28]
    assert is_sync_point(config, before, Progress(1000, 9000, 5, 1000)), "the end of an epoch"
    assert not is_sync_point(config, TrainState(Progress(1000, 9000), epoch=1), Progress(1000, 9000, 5, 1000))


def test_an_evaluation_is_due_until_it_is_done_and_a_job_is_not_over_before() -> None:
    config = configure(None, ["epochs=2"])[0]
    end = Progress(10, 20, 5, 20)
    one, two = TrainState(end, epoch=1, evaluated=3), TrainState(end, epoch=2, evaluated=5)
    assert (evaluation_due(config, one), stop_reason(config, one)) == (True, "")
    assert (evaluation_due(config, two), stop_reason(config, two)) == (False, "epochs=2")
    assert not evaluation_due(config, TrainState(Progress(10, 20, 4, 16), epoch=1, evaluated=3))
