"""When a checkpoint is written, that training does not wait for the disk, and what happens when the disk does not take it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.config.schema import CheckpointConfig
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Event, Log
from hvdtrain.train.checkpoint import files
from hvdtrain.train.checkpoint.saver import RETRY_S, Saver
from hvdtrain.train.progress.train_state import TrainState

IDENTITY = {"seed": 1, "data": {"samples": 100}}


class Counting:
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


class Desk:
    """A saver with everything that it talks to."""

    def __init__(self, run: Path, **config: object) -> None:
        self.run, self.clock, self.learner, self.heard = run, Clock(), Counting(), list[Event]()
        settings = CheckpointConfig(**{"every_minutes": None, "keep_last": 9, **config})  # type: ignore[arg-type]
        self.saver = Saver(run, settings, IDENTITY, Log([self.heard.append]), self.clock)

    def meet(self, *steps: int, evaluated: int = 0) -> None:
        for step in steps:
            self.saver.due(step)
            self.saver.save_if_due(at(step, evaluated), self.learner)  # type: ignore[arg-type]
        self.saver.close()

    def steps(self) -> list[int]:
        return [int(folder.name[5:]) for folder in files.finished(self.run)]

    def kinds(self) -> list[tuple[str, int]]:
        return [(event.kind, event.step) for event in self.heard]


def at(step: int, evaluated: int = 0) -> TrainState:
    return TrainState(Progress(100, 1000, step, step), evaluated=evaluated)


def test_every_so_many_steps(tmp_path: Path) -> None:
    desk = Desk(tmp_path, every_steps=4)
    desk.meet(1, 2, 3, 4, 5, 8, 9)
    assert desk.steps() == [4, 8]
    assert desk.kinds() == [("checkpoint", 4), ("checkpoint", 8)]
    assert desk.learner.copies == 2


def test_every_so_many_minutes(tmp_path: Path) -> None:
    desk = Desk(tmp_path, every_minutes=2)
    for step in range(1, 8):
        desk.clock.now += 50
        desk.meet(step)
    assert desk.steps() == [3, 6]


def test_at_the_end_of_an_epoch_once(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.meet(1, 2)
    assert desk.steps() == []
    desk.meet(3, evaluated=3)
    desk.meet(3, evaluated=3)
    assert desk.steps() == [3]
    assert desk.learner.copies == 1
    assert desk.saver.finish(at(3, 3), desk.learner) == ""  # type: ignore[arg-type]
    assert desk.learner.copies == 1


def test_training_goes_on_while_the_disk_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write waits until the state has been changed behind its back: what is on the disk is the state of the call."""
    free, real = threading.Event(), files.write

    def slow(*arguments: object) -> Path:
        assert free.wait(20)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "write", slow)
    desk = Desk(tmp_path, every_steps=2)
    assert desk.saver.due(2) and not desk.saver.due(3)
    desk.saver.save_if_due(at(2), desk.learner)  # type: ignore[arg-type]
    desk.saver.save_if_due(at(3), desk.learner)  # type: ignore[arg-type]
    assert desk.steps() == []  # training is at step 3, and nothing is on the disk yet
    desk.learner.copies = 50
    free.set()
    desk.saver.close()
    assert desk.steps() == [2]
    assert files.read_arrays(tmp_path / "checkpoints" / "step-00000002", 2**20)["p.w"].tolist() == [1.0] * 3
    (event,) = desk.heard
    assert event.fields["pause_s"] < event.fields["write_s"]


def test_a_disk_that_takes_nothing_is_told_and_tried_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, every_steps=10)
    desk.meet(10)
    (tmp_path / "checkpoints").rename(tmp_path / "kept")
    (tmp_path / "checkpoints").write_text("no folder")  # whoever you are: a file takes no files
    desk.meet(20, 21)
    event = desk.heard[-1]
    assert (event.kind, event.step) == ("checkpoint_failed", 20)
    reason = event.fields["reason"]
    assert event.fields["lines"] == [
        f"no checkpoint of step 20: {reason}; the newest is of step 10; training goes on, and tries again after {RETRY_S:.0f} s"
    ]
    assert desk.saver.finish(at(22), desk.learner) == reason != ""  # type: ignore[arg-type]
    desk.clock.now += RETRY_S - 1
    desk.meet(23)
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "kept").rename(tmp_path / "checkpoints")
    desk.clock.now += 2
    desk.meet(24)
    assert desk.steps() == [10, 24]
    desk.meet(25)
    assert desk.steps() == [10, 24]


def test_an_evaluation_after_the_checkpoint_of_its_step_is_written_too(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    assert desk.saver.finish(at(5), desk.learner) == ""  # type: ignore[arg-type]
    again = Desk(tmp_path)
    again.saver.resume_from(at(5))
    again.meet(5)
    assert again.learner.copies == 0
    again.meet(5, evaluated=5)
    assert files.read_numbers(tmp_path / "checkpoints" / "step-00000005").train_state.evaluated == 5


def test_weights_that_are_not_finite_are_no_checkpoint(tmp_path: Path) -> None:
    desk = Desk(tmp_path, every_steps=1)
    desk.meet(1)
    fine = desk.learner.state
    desk.learner.state = lambda: {"b.mask": np.array([-np.inf]), "p.w": np.array([1.0, np.nan])}  # type: ignore[method-assign]
    desk.meet(2)
    assert desk.heard[-1].fields["reason"] == "p.w is not finite"
    assert desk.steps() == [1]
    desk.learner.state = lambda: {"b.mask": np.array([-np.inf]), **fine()}  # type: ignore[method-assign]
    desk.meet(3)
    assert desk.steps() == [1, 3]
