"""When a checkpoint is written, that training does not wait for the disk, and what happens when the
disk does not take it."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rank_threads import ThreadRank, in_threads
from ranks import needs_extra

from hvdtrain.comm import on_all_ranks
from hvdtrain.comm.communicator import Buffer, Op, SingleProcessCommunicator
from hvdtrain.config.sections.checkpoint import CheckpointConfig
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Event, Log
from hvdtrain.training.checkpoint import checkpoints, files
from hvdtrain.training.checkpoint.checkpoints import Checkpoints
from hvdtrain.training.checkpoint.optimal_interval import optimal_interval_s
from hvdtrain.training.checkpoint.saver import RETRY_S, Saver
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.monitor import Deadline
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.sync_point import write_last_checkpoint

IDENTITY = {"seed": 1, "data": {"samples": 100}}


class CountingLearner:
    """A learner of one weight, which counts how often its state was copied."""

    def __init__(self) -> None:
        self.copies = 0

    def state(self) -> Arrays:
        self.copies += 1
        return {"p.w": np.full(3, float(self.copies))}

    def state_dict_names(self) -> dict[str, str]:
        return {"w": "p.w"}


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class SavedRun:
    """A saver with its run folder, its clock, its learner and its events."""

    def __init__(self, run: Path, **config: object) -> None:
        self.run = run
        self.clock = Clock()
        self.learner = CountingLearner()
        self.events = list[Event]()
        settings = CheckpointConfig(**{"every_minutes": None, "keep_last": 9, **config})  # type: ignore[arg-type]
        self.saver = Saver(run, settings, IDENTITY, Log([self.events.append]), self.clock)

    def synchronize(self, *steps: int, evaluated: int = 0) -> None:
        for step in steps:
            self.saver.due(step)
            self.saver.save_if_due(at(step, evaluated), self.learner)  # type: ignore[arg-type]
        self.saver.close()

    def steps(self) -> list[int]:
        return [int(folder.name[5:]) for folder in files.finished(self.run)]

    def kinds(self) -> list[tuple[str, int]]:
        return [(event.kind, event.step) for event in self.events]


def at(step: int, evaluated: int = 0) -> TrainState:
    return TrainState(Progress(100, 1000, step, step), evaluated=evaluated)


def test_every_so_many_steps(tmp_path: Path) -> None:
    job = SavedRun(tmp_path, every_steps=4)
    job.synchronize(1, 2, 3, 4, 5, 8, 9)
    assert job.steps() == [4, 8]
    assert job.kinds() == [("checkpoint", 4), ("checkpoint", 8)]
    assert job.learner.copies == 2


@needs_extra("checkpoint_interval")
def test_the_interval_follows_from_what_a_checkpoint_costs(tmp_path: Path) -> None:
    """The first one is written after a guess; then its measured cost counts, which the event tells,
    and the first line."""
    job = SavedRun(tmp_path, every="auto")
    job.saver.due(1)
    job.clock.now += 3600
    job.synchronize(2, 3)
    assert job.steps() == [2]
    (event,) = job.events
    pause_s = event.fields["pause_s"]
    whole_s = event.fields["pause_s"] + event.fields["write_s"]
    assert event.fields["every_s"] == pytest.approx(
        max(optimal_interval_s(pause_s, 24 * 3600), 10 * whole_s, 10.0), abs=0.1
    )
    (line,) = event.fields["lines"]
    assert line.startswith("checkpoint every ") and line.endswith("a fault every 24 h (0 so far)")
    job.clock.now += event.fields["every_s"] - 0.01
    job.synchronize(4)
    job.clock.now += 0.02
    job.synchronize(5)
    assert job.steps() == [2, 5]


def test_every_so_many_minutes(tmp_path: Path) -> None:
    job = SavedRun(tmp_path, every_minutes=2)
    for step in range(1, 8):
        job.clock.now += 50
        job.synchronize(step)
    assert job.steps() == [3, 6]


def test_at_the_end_of_an_epoch_once(tmp_path: Path) -> None:
    job = SavedRun(tmp_path)
    job.synchronize(1, 2)
    assert job.steps() == []
    job.synchronize(3, evaluated=3)
    job.synchronize(3, evaluated=3)
    assert job.steps() == [3]
    assert job.learner.copies == 1
    assert job.saver.finish(at(3, 3), job.learner) == ""  # type: ignore[arg-type]
    assert job.learner.copies == 1


def test_training_goes_on_while_the_disk_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write waits until the state has been changed behind its back: what is on the disk is the
    state of the call."""
    free = threading.Event()
    writing = threading.Event()
    open_file = os.open

    def slow(*arguments: Any, **more: Any) -> int:
        if threading.current_thread().name == "checkpoint":
            writing.set()
            assert free.wait(300)
        return open_file(*arguments, **more)

    monkeypatch.setattr(os, "open", slow)
    job = SavedRun(tmp_path, every_steps=2)
    assert job.saver.due(2) and not job.saver.due(3)
    job.saver.save_if_due(at(2), job.learner)  # type: ignore[arg-type]
    job.saver.save_if_due(at(3), job.learner)  # type: ignore[arg-type]
    assert job.steps() == []  # training is at step 3, and nothing is on the disk yet
    job.learner.copies = 50
    assert writing.wait(300)
    time.sleep(0.1)  # a part of write_s
    free.set()
    job.saver.close()
    assert job.steps() == [2]
    assert (
        files.read_arrays(tmp_path / "checkpoints" / "step-00000002", 2**20)["p.w"].tolist()
        == [1.0] * 3
    )
    (event,) = job.events
    assert event.fields["pause_s"] < event.fields["write_s"]


def test_a_write_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    open_file = os.open

    def slow(*arguments: Any, **more: Any) -> int:
        assert threading.current_thread().name != "checkpoint" or free.wait(300)
        return open_file(*arguments, **more)

    monkeypatch.setattr(os, "open", slow)
    job = SavedRun(tmp_path)
    job.saver.save(at(2), job.learner)  # type: ignore[arg-type]
    second = threading.Thread(target=job.saver.save, args=(at(4), job.learner))
    second.start()
    second.join(0.1)
    assert second.is_alive() and job.learner.copies == 1
    free.set()
    second.join()
    job.saver.close()
    assert job.steps() == [2, 4] and job.kinds() == [("checkpoint", 2), ("checkpoint", 4)]


def test_a_write_that_fails_is_reported_and_repeated_later(tmp_path: Path) -> None:
    job = SavedRun(tmp_path, every_steps=10)
    job.synchronize(10)
    (tmp_path / "checkpoints").rename(tmp_path / "kept")
    (tmp_path / "checkpoints").write_text("no folder")  # whoever you are: a file takes no files
    job.synchronize(20, 21)
    event = job.events[-1]
    assert (event.kind, event.step) == ("checkpoint_failed", 20)
    reason = event.fields["reason"]
    assert event.fields["lines"] == [
        f"no checkpoint of step 20: {reason}; the newest is of step 10; training continues, and "
        f"tries again every {RETRY_S:.0f} s"
    ]
    assert job.saver.finish(at(22), job.learner) == reason != ""  # type: ignore[arg-type]
    job.clock.now += RETRY_S - 1
    job.synchronize(23)
    job.clock.now -= 1
    job.synchronize(30)
    assert job.events[-1].fields["lines"] == ["no checkpoint of step 30: still none since step 10"]
    job.clock.now += RETRY_S
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "kept").rename(tmp_path / "checkpoints")
    job.clock.now += 2
    job.synchronize(24)
    assert job.steps() == [10, 24]
    job.synchronize(25)
    assert job.steps() == [10, 24]


def test_a_write_without_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = SavedRun(tmp_path, every_steps=10)

    def exhausted(*args: object, **options: object) -> int:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", exhausted)
        job.synchronize(10, 11)
    assert job.events[-1].kind == "checkpoint_failed"
    assert re.fullmatch(
        r"out of memory to write a checkpoint of \d+\.\d MB", job.events[-1].fields["reason"]
    )


def test_an_evaluation_after_the_checkpoint_of_its_step_is_written_too(tmp_path: Path) -> None:
    job = SavedRun(tmp_path)
    assert job.saver.finish(at(5), job.learner) == ""  # type: ignore[arg-type]
    again = SavedRun(tmp_path)
    again.saver.resume_from(at(5))
    again.synchronize(5)
    assert again.learner.copies == 0
    again.synchronize(5, evaluated=5)
    assert files.read_numbers(tmp_path / "checkpoints" / "step-00000005").train_state.evaluated == 5


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path: Path) -> None:
    job = SavedRun(tmp_path, every_steps=1)
    job.synchronize(1)
    fine = job.learner.state
    job.learner.state = lambda: {"b.mask": np.array([-np.inf]), "p.w": np.array([1.0, np.nan])}  # type: ignore[method-assign]
    job.synchronize(2)
    assert job.events[-1].fields["reason"] == "p.w is not finite"
    assert job.steps() == [1]
    job.learner.state = lambda: {"b.mask": np.array([-np.inf]), **fine()}  # type: ignore[method-assign]
    job.synchronize(3)
    assert job.steps() == [1, 3]


class LostInTheSecondSum(SingleProcessCommunicator):
    """One of two ranks, while the other one ends."""

    size = 2
    sums = 0

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        self.sums += 1
        if self.sums == 2:
            raise ConnectionError("the other rank is lost")
        return x


def test_a_rank_that_is_lost_before_it_writes_its_part_is_noticed_by_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer waits for the part, until somebody notices; rank 0 would wait for its writer."""
    monkeypatch.setattr(checkpoints, "LOOK_S", 0.01)
    job = SavedRun(tmp_path, every_steps=4)
    given_up = threading.Event()
    job.learner.is_sharded = True  # type: ignore[attr-defined]
    ranks = LostInTheSecondSum()
    beats = Heartbeat()
    of_job = Checkpoints(ranks, job.learner, tmp_path, 2**20, job.saver, go_on=beats.go_on)  # type: ignore[arg-type]
    job.saver._thread = threading.Thread(target=given_up.wait, args=(300,))
    job.saver._thread.start()
    with pytest.raises(ConnectionError):
        of_job.save(at(8))
    assert job.saver._thread.is_alive()
    assert beats.beats == 0  # nothing moves on: the watchdog counts this time
    given_up.set()


def test_the_last_checkpoint_may_take_any_time_while_bytes_come_to_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """guard.start_s counts from the last of them, on the ranks that wait, too."""
    monkeypatch.setattr(files, "SYNC_BYTES", 1)
    monkeypatch.setattr(on_all_ranks, "MEET_S", 0.0)

    def finish(communicator: ThreadRank) -> int:
        beats = Heartbeat()
        job = SavedRun(tmp_path)
        job.learner.is_sharded = False  # type: ignore[attr-defined]
        saver = None if communicator.rank else job.saver
        of_rank = Checkpoints(communicator, job.learner, tmp_path, 2**20, saver, go_on=beats.go_on)  # type: ignore[arg-type]
        assert of_rank.finish(at(8)) == ("", True)
        return beats.beats

    beats = in_threads(2, finish)
    assert beats[0] == beats[1] > 0


@pytest.mark.parametrize(("left_s", "is_told"), [(95.0, True), (97.0, False)])
def test_a_stop_that_comes_too_late_for_a_checkpoint_says_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], left_s: float, is_told: bool
) -> None:
    """By what the longest one has taken, and the end of the job itself."""
    job = SavedRun(tmp_path, every_steps=1)
    job.learner.is_sharded = False  # type: ignore[attr-defined]
    job.synchronize(1)
    assert 0 < job.saver.measured_s < 60 and capfd.readouterr().err == ""
    job.saver.measured_s = 96.0
    limit = Deadline("1h", {}, started_s=0.0, now_s=0.0, clock=lambda: 3600 - left_s)
    of_job = Checkpoints(SingleProcessCommunicator(), job.learner, tmp_path, 2**20, job.saver)  # type: ignore[arg-type]
    loop: Any = SimpleNamespace(
        heartbeat=Heartbeat(), checkpoints=of_job, health=SimpleNamespace(deadline=limit)
    )
    for _ in range(2):  # the second time it is on the disk
        assert write_last_checkpoint(loop, at(2), "guard.max_time=1h", is_over=False) == ""
    line = (
        "guard.max_time=1h: 95 s are left for the last checkpoint, and one of this run has taken "
        "96 s; where it is cut off, "
    )
    assert capfd.readouterr().err == f"hvdtrain: {line}the newest is of step 1\n" * is_told
