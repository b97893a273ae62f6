"""The checkpoints of a job, on every rank: rank 0 writes and reads them, and what it reads reaches all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.rank_0 import on_rank_0
from hvdtrain.core.arrays import Arrays
from hvdtrain.frameworks.learner import Learner
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.resume import newest_good
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.replicas.broadcast import broadcast_state


class LastWrite(NamedTuple):
    """Whether the last checkpoint of a job is on the disk; the same on every rank."""

    failure: str  # why it is not there; empty where it is
    any_left: bool  # the run folder has this or an older checkpoint


class Checkpoints:
    """One on each rank; only rank 0's has a saver. A run without checkpoints (a bench) has none on any rank."""

    def __init__(self, communicator: Communicator, learner: Learner, run: Path, limit_bytes: int, saver: Saver | None) -> None:
        self._communicator, self._learner, self._run, self._limit_bytes = communicator, learner, run, limit_bytes
        self.saver = saver

    @property
    def longest_s(self) -> float:
        """Seconds of the longest write so far, a guess before the first; 0 on ranks without a saver."""
        return self.saver.longest_s if self.saver else 0.0

    def due(self, step: int) -> bool:
        """Whether rank 0 wants to write at the sync point after `step` steps."""
        return self.saver is not None and self.saver.due(step)

    def save(self, now: TrainState) -> None:
        """Writes in the background; rank 0 alone does something, and no collective is inside."""
        if self.saver:
            self.saver.save(now, self._learner)

    def save_if_due(self, now: TrainState) -> None:
        """The same, where due() chose this step, or where this step was just evaluated."""
        if self.saver:
            self.saver.save_if_due(now, self._learner)

    def roll_back(self) -> None:
        """Loads the newest good checkpoint into every rank. Every rank calls it. Raises UserError where none is good."""
        restored: Arrays | None = None

        def read() -> None:
            nonlocal restored
            self.close()
            _, restored, _ = newest_good(self._run, self._limit_bytes)

        on_rank_0(self._communicator, read)
        broadcast_state(self._communicator, self._learner, restored)

    def finish(self, now: TrainState) -> LastWrite:
        """Writes the last checkpoint, and waits for it. Every rank calls it."""

        def write() -> LastWrite:
            failure = self.saver.finish(now, self._learner) if self.saver else ""
            return LastWrite(failure, bool(files.finished(self._run)))

        return on_rank_0(self._communicator, write)

    def close_on_all_ranks(self) -> None:
        """Returns on every rank once no write is under way on rank 0. Every rank calls it."""
        on_rank_0(self._communicator, self.close)

    def close(self) -> None:
        """Waits for a write that is under way on this rank."""
        if self.saver:
            self.saver.close()
