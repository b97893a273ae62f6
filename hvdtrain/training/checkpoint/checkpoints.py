"""The checkpoints of a job, on every rank: rank 0 writes and reads them, and broadcasts what it
reads."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import long_on_rank_0, on_rank_0
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.folder import UNFINISHED, Folder
from hvdtrain.events.terminal import warn
from hvdtrain.frameworks.learner import HasState
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.load import load_found
from hvdtrain.training.checkpoint.ranges import CheckpointInParts
from hvdtrain.training.checkpoint.resume import GoodCheckpoint, Reading, best, newest
from hvdtrain.training.checkpoint.saver import LOOK_S, Saved, Saver
from hvdtrain.training.checkpoint.shards import CheckpointShard, WrittenByAll, write_parts
from hvdtrain.training.progress.train_state import TrainState

GRACE_S = 10.0  # time at the end of a job for rank 0 to create the folder that the others write to


class LastWrite(NamedTuple):
    """Whether the last checkpoint of a job is on disk; the same on every rank."""

    failure: str  # why it is missing; empty if it is there
    any_left: bool  # the run folder has this or an older checkpoint


class Checkpoints:
    """The checkpoints of a job, one object on each rank. Only rank 0's has a saver; a run without
    checkpoints (a bench) has none."""

    def __init__(
        self,
        communicator: Communicator,
        learner: HasState,
        run: Path,
        limit_bytes: int,
        saver: Saver | None,
        hosts: Sequence[str] = (),
        go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """go_on: called on every rank while a write that all wait for progresses, so that its time
        does not count towards time limits."""
        self._communicator = communicator
        self._learner = learner
        self.run = run
        self._limit_bytes = limit_bytes
        self.saver = saver
        self._hosts = list(hosts) or [""] * communicator.size
        self._go_on = go_on
        self._moves = 0  # progress of rank 0's saver, as last known on all ranks
        self._expected = (
            False  # whether the last sync point may be one at which a checkpoint is due
        )
        self._disk_is_shared: bool | None = None
        self._thread: threading.Thread | None = None  # writes this rank's part
        # set if a queued part is no longer needed, or if no rank waits for this one
        self._over = threading.Event()
        self._lost = threading.Event()

    def on_other_ranks(self, hosts: Sequence[str]) -> Checkpoints:
        """Returns the job's checkpoints for a communicator whose ranks have changed."""
        return Checkpoints(
            self._communicator,
            self._learner,
            self.run,
            self._limit_bytes,
            self.saver,
            hosts,
            self._go_on,
        )

    @property
    def longest_s(self) -> float:
        """Seconds of the longest write so far, a guess before the first; 0 on ranks without a
        saver."""
        return self.saver.longest_s if self.saver else 0.0

    def due(self, step: int) -> bool:
        """Whether rank 0 wants to write at the sync point after `step` steps."""
        return self.saver is not None and self.saver.due(step)

    def expect(self) -> None:
        """Prepares for a sync point after which save_if_due() may write. Every rank calls it."""
        self._expected = True

    def save(self, now: TrainState) -> None:
        """Writes in the background. Every rank calls it: if the state is sharded, each rank writes
        its own part."""
        self._wait_for_the_write_before()
        if self._learner.is_sharded:
            self._save_parts(now)
        elif self.saver:
            self.saver.save(now, self._learner)

    def may_save(self, now: TrainState) -> bool:
        """Whether save_if_due() may save one; the same on every rank."""
        return self._expected or now.evaluated == now.progress.step

    def save_if_due(self, now: TrainState) -> None:
        """Saves a checkpoint if due() chose this step, or if this step was just evaluated."""
        may_save = self.may_save(now)
        expected = self._expected
        self._expected = False
        if may_save:
            self._wait_for_the_write_before()
        if self._learner.is_sharded:
            if expected:
                self._save_parts(now)
        elif self.saver:
            self.saver.save_if_due(now, self._learner)

    def _save_parts(self, now: TrainState) -> None:
        """A collective in which rank 0 decides; then each rank writes in its own thread. No other
        write may be pending."""

        def unfinished() -> str:
            return (
                files.unfinished_name(now.progress.step, secrets.token_hex(8))
                if self.saver and self.saver.wants(now)
                else ""
            )

        name = on_rank_0(self._communicator, unfinished)
        self._stop_writing()
        if not name:
            return
        if self._disk_is_shared is None:
            self._disk_is_shared = self._see_one_disk()
        if not self._disk_is_shared:
            state = self._learner.state(is_kept=self.saver is not None)
            if self.saver:
                self.saver.save(now, Saved(state, self._learner.state_dict_names()))
            return
        several_hosts = len(set(self._hosts)) > 1
        parts = CheckpointShard(
            list(self._learner.pieces()),
            files.ARRAYS,
            files.file_of,
            self._communicator.rank,
            several_hosts=several_hosts,
        )
        self._over = threading.Event()
        self._lost = threading.Event()
        if self.saver:
            written = WrittenByAll(
                parts, range(1, self._communicator.size), self._hosts, name, self._lost.is_set
            )
            self.saver.save(now, Saved(written, self._learner.state_dict_names()))
        elif self._communicator.rank:
            arguments = (parts, self.run, name, self._over.is_set, self._lost.is_set)
            self._thread = threading.Thread(
                target=write_parts, args=arguments, name="checkpoint", daemon=True
            )
            self._thread.start()

    def _wait_for_the_write_before(self) -> None:
        """Repeats a collective until the write is done: time limits count only the time in which
        the write makes no progress.

        It detects the loss of a rank that rank 0's writer waits for.
        """
        is_writing = 1
        while is_writing:
            own = self.saver is not None and self.saver.is_writing(LOOK_S)
            state = np.array([own, self.saver.moves if self.saver else 0], np.int64)
            is_writing, moves = map(
                int, self._communicator.allreduce(state, "checkpoint.is_writing")
            )
            if moves != self._moves:
                self._moves = moves
                self._go_on()

    def _see_one_disk(self) -> bool:
        """Whether all ranks see rank 0's files in the run folder. A collective."""
        name = on_rank_0(self._communicator, lambda: f".seen.{secrets.token_hex(8)}{UNFINISHED}")
        if self._communicator.rank == 0:
            with contextlib.suppress(OSError), Folder.open(self.run) as folder:
                folder.create(name).close()
        self._communicator.allgather_object(None)  # the writer has ended by now
        seen = self._communicator.allgather_object((self.run / name).exists())
        blind = [rank for rank, sees in enumerate(seen) if not sees]
        if self._communicator.rank == 0:
            with contextlib.suppress(OSError), Folder.open(self.run) as folder:
                folder.remove(name)
            if blind:
                warn(
                    f"rank {blind[0]} on {self._hosts[blind[0]]} does not see the run folder "
                    f"{self.run} of rank 0: for each checkpoint "
                    "rank 0 gathers the whole training state in its memory; give run= a folder "
                    "that all hosts share"
                )
        return not blind

    def _stop_writing(self, grace_s: float = 0.0) -> None:
        """On a rank other than 0, waits until rank 0 no longer needs it. After grace_s, a part that
        has not begun is dropped."""
        if self._thread is not None:
            self._thread.join(grace_s)
            self._over.set()
            self._thread.join()
            self._thread = None

    def give_up(self) -> None:
        """After a loss, makes a pending sharded checkpoint stop waiting for the parts of lost
        ranks."""
        self._lost.set()
        self._stop_writing()

    def roll_back(self) -> TrainState:
        """Loads the newest good checkpoint into every rank, and returns its state. Every rank calls
        it.

        Raises UserError if none is good.
        """
        now = self._load(newest)
        assert now is not None
        return now

    def load_best(self) -> TrainState | None:
        """Loads the checkpoint whose evaluation was best; None if none was evaluated."""
        return self._load(best)

    def _load(self, choose: Callable[[Path, Reading], GoodCheckpoint | None]) -> TrainState | None:
        self._wait_for_the_write_before()

        def find(reading: Reading) -> tuple[TrainState | None, Arrays | CheckpointInParts | None]:
            self.close()
            good = choose(self.run, reading)
            return (None, None) if good is None else (good.checkpoint.train_state, good.arrays)

        return load_found(
            self._communicator, self._learner, find, self._limit_bytes, self._go_on
        ).found

    def finish(self, now: TrainState) -> LastWrite:
        """Writes the last checkpoint, and waits for it. Every rank calls it."""

        if self._learner.is_sharded and self._communicator.size > 1:
            failure: str | None = None
            while failure is None:
                self.save(now)
                self._wait_for_the_write_before()
                failure = on_rank_0(
                    self._communicator, lambda: self.saver.last_failure(now) if self.saver else ""
                )
            last = failure
            return on_rank_0(
                self._communicator, lambda: LastWrite(last, bool(files.finished(self.run)))
            )

        def write(moved: Callable[[], None]) -> LastWrite:
            failure = self.saver.finish(now, self._learner, moved) if self.saver else ""
            return LastWrite(failure, bool(files.finished(self.run)))

        return long_on_rank_0(self._communicator, write, self._go_on)

    def close_on_all_ranks(self) -> None:
        """Returns on every rank once rank 0 has no pending write. Every rank calls it."""
        self._wait_for_the_write_before()
        on_rank_0(self._communicator, self.close)

    def close(self) -> None:
        """Waits for a pending write on this rank."""
        self._stop_writing(GRACE_S)
        if self.saver:
            self.saver.close()
