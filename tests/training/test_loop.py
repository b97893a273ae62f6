"""The trainer's loop at its sync points: what all ranks learn there, and what is relied on before a
loss is out of the question."""

from __future__ import annotations

from typing import Any

import pytest
from rank_threads import ThreadRank, in_threads

from hvdtrain.comm.communicator import Buffer, Op, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.events.log import Event, Log
from hvdtrain.training.build import build_learner
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import Job, make_job
from hvdtrain.training.loop import train
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.start import begin

DATA = ["data.name=synthetic", "data.samples=24", "data.val_samples=8", "data.shape=[4,4,1]"]
# sync points after steps 2, 4 and 6, where the epoch ends
STEPS = [
    "batch.size=4",
    "epochs=1",
    "log.every_steps=2",
]
WORDS = ["framework=numpy", "model.name=linear", *DATA, *STEPS]


class Lost(Exception):
    """A rank is gone."""


class LosesRanks(SingleProcessCommunicator):
    """One process; it records what the loop does together with other ranks, and finds a loss when
    confirm() is called so often."""

    def __init__(self, lost_at: int = 0) -> None:
        self.calls: list[str] = []
        self._lost_at = lost_at

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        self.calls.append(name)
        return x

    def confirm(self) -> None:
        self.calls.append("confirm")
        if self.calls.count("confirm") == self._lost_at:
            raise Lost


class SyncPointCopy:
    """A copy of the state that remembers only which sync point it is of."""

    def __init__(self, ranks: LosesRanks, now: TrainState) -> None:
        self.confirm = ranks.confirm
        self.now = now

    def keep(self, now: TrainState) -> None:
        self.now = now


def make(communicator: Any) -> tuple[Job, TrainState, list[Event]]:
    config = configure(None, WORDS)
    events = list[Event]()
    datasets = open_datasets(config)
    start = begin(config, datasets)
    learner = build_learner(config, datasets.task, communicator)
    job = make_job(
        config,
        datasets,
        communicator,
        learner,
        signals=Signals(0),
        heartbeat=Heartbeat(),
        log=Log([events.append]),
        start=start,
        run=None,
    )
    return job, start, events


def test_sums_are_relied_on_once_no_rank_was_lost_in_them() -> None:
    ranks = LosesRanks()
    job, start, _ = make(ranks)
    job.memory_copy = SyncPointCopy(ranks, start)
    train(job, start)
    job.prefetcher.close()
    calls = [name for name in ranks.calls if name in ("train.sums", "val.sums", "confirm")]
    assert calls == ["train.sums", "confirm"] * 3 + ["val.sums", "confirm"]


def test_a_loss_in_the_sums_leaves_the_copy_of_the_sync_point_before() -> None:
    ranks = LosesRanks(lost_at=2)
    job, start, events = make(ranks)
    job.memory_copy = copy = SyncPointCopy(ranks, start)
    with pytest.raises(Lost):
        train(job, start)
    job.prefetcher.close()
    assert copy.now.progress.step == 2
    assert [event.step for event in events if event.kind == "step"] == [2]


def test_a_signal_to_one_rank_stops_all_at_the_next_sync_point() -> None:
    def of_rank(rank: ThreadRank) -> tuple[int, str]:
        job, start, _ = make(rank)
        job.health.signals.received = "SIGUSR2" if rank.rank == 1 else ""
        now, reason = train(job, start)
        job.prefetcher.close()
        return now.progress.step, reason

    assert in_threads(2, of_rank) == [(2, "a signal on another rank"), (2, "SIGUSR2")]
