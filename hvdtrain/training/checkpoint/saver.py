"""When rank 0 writes a checkpoint, and the thread that writes it: training waits for a copy of the
state only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from hvdtrain.config.sections.checkpoint import CheckpointConfig
from hvdtrain.core.arrays import Arrays
from hvdtrain.core.extras import implementing_module
from hvdtrain.core.folder import Folder
from hvdtrain.errors import Diverged, UserError
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import plain_names
from hvdtrain.training.checkpoint import files, prune, room
from hvdtrain.training.checkpoint.files import Identity, OpenFolder
from hvdtrain.training.checkpoint.shards import WrittenByAll
from hvdtrain.training.progress.train_state import TrainState


class Interval(Protocol):
    """The time between two checkpoints on rank 0, which checkpoint.every=auto adapts."""

    seconds: float

    def measured(self, pause_s: float, write_s: float) -> str:
        """Records the pause and the write time of a checkpoint; returns a line if the interval has
        changed."""


class CheckpointSource(Protocol):
    """The source of a checkpoint's arrays: a learner, or the parts that ranks write."""

    def state(self) -> Arrays | WrittenByAll: ...
    def state_dict_names(self) -> dict[str, str]: ...


class Saved:
    """A CheckpointSource whose arrays are already known."""

    def __init__(self, state: Arrays | WrittenByAll, names: dict[str, str]) -> None:
        self._state = state
        self._names = names

    def state(self) -> Arrays | WrittenByAll:
        return self._state

    def state_dict_names(self) -> dict[str, str]:
        return self._names


LOOK_S = 0.5  # between two checks whether a write is done
RETRY_S = 30.0  # after a write that failed
SLOW_DISK = 1e8  # bytes a second


class WriteResult(NamedTuple):
    """The result of one write."""

    step: int
    evaluated: int  # see TrainState.evaluated
    pause_s: float  # pause of training
    write_s: float
    megabytes: float
    failure: str = ""  # why it failed
    note: str = ""  # a line for the user
    needed_bytes: int = 0  # on the disk


def check_finite(arrays: Arrays) -> None:
    """Raises Diverged if a weight or optimizer state is not finite. A buffer may contain infinity
    on purpose, as masks do."""
    for name, array in arrays.items():
        if not name.startswith("b.") and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise Diverged(
                f"{name} is not finite",
                "checkpoint",
                "a lower optim.base_lr; the checkpoint before is good",
            )


class Saver:
    """Writes checkpoints, on rank 0. Call save_if_due() after every sync point; it calls no
    collective. Emits events in the main thread.

    limit_bytes: the largest possible file of a checkpoint; an eighth of it is the first guess of a
    checkpoint's size. record_config: writes this job's configuration to config.yaml, or raises
    OSError; called once there are weights trained with it. open_run: opens the run folder for
    writing. mtbf_hours: guard.mtbf_hours, for checkpoint.every=auto.
    """

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        identity: Identity,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        limit_bytes: int = 2**20,
        record_config: Callable[[], None] | None = None,
        open_run: OpenFolder = Folder.open,
        mtbf_hours: float | None = None,
    ) -> None:
        self._run = run
        self._config = config
        self._identity = identity
        self._log = log
        self._clock = clock
        self._record_config = record_config
        self._open_run = open_run
        self._thread: threading.Thread | None = None
        self._result: WriteResult | None = None
        self._tried_s = clock()  # when the last write began
        self._failed = False
        self._due_step = -1  # the last step at which a checkpoint was due
        self._kept_step = -1  # step of the newest checkpoint to keep
        # (step, step of its last evaluation) of the newest checkpoint of this run on the disk
        self.newest = (
            -1,
            0,
        )
        self._limit_bytes = limit_bytes
        self._told = ""  # why the last writes failed, as reported to the user
        self._given_up: list[int] = []  # steps of checkpoints removed to make room for the last one
        self._last_attempts = 0  # attempts to write the last one
        self.moves = 0  # grows while a write progresses
        self.longest_s = limit_bytes / 8 / SLOW_DISK  # pause and write together
        self.measured_s = 0.0  # seconds of the slowest write of this process
        longest_s = None if config.every_minutes is None else 60 * config.every_minutes
        self._auto: Interval | None = None
        if config.every == "auto":
            module = implementing_module("checkpoint.every")
            self._auto = module.AutoInterval(run, mtbf_hours, longest_s, self.longest_s)
        self._fixed_s = longest_s

    def resume_from(self, now: TrainState) -> None:
        """Records the checkpoint that the job resumes from, so that it is not written again; during
        the write there would be no checkpoint."""
        if any(
            folder.name == files.name_of(now.progress.step) for folder in files.finished(self._run)
        ):
            self.newest = (now.progress.step, now.evaluated)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due at the sync point after `step` steps. Call it before the sync
        point, so that ranks are compared there."""
        if self._thread and not self._thread.is_alive():
            self._collect()
        every_steps = self._config.every_steps
        every_s = self._fixed_s if self._auto is None else self._auto.seconds
        waited_s = self._clock() - self._tried_s
        due = (
            (every_steps is not None and step % every_steps == 0)
            or (every_s is not None and waited_s >= every_s)
            or (self._failed and waited_s >= RETRY_S)
        )
        if due:
            self._due_step = step
        return due

    def save_if_due(self, now: TrainState, learner: CheckpointSource) -> None:
        """Writes in the background if a checkpoint is due, and after an evaluation."""
        if now.progress.step in (self._due_step, now.evaluated):
            self.save(now, learner)

    def save(self, now: TrainState, learner: CheckpointSource) -> None:
        """Waits for the previous write, copies the state and writes it in the background. Skips a
        checkpoint that is already on disk."""
        began = time.perf_counter()
        if not self.wants(now):
            return
        if now.is_kept:
            self._kept_step = now.progress.step
        arrays = learner.state()  # the host copy, and on a GPU the wait for the device
        names = learner.state_dict_names()
        self._tried_s = self._clock()
        pause_s = time.perf_counter() - began
        self._thread = threading.Thread(
            target=self._write, args=(now, arrays, names, pause_s), name="checkpoint"
        )
        self._thread.start()

    def finish(
        self, now: TrainState, learner: CheckpointSource, moved: Callable[[], None] = lambda: None
    ) -> str:
        """Writes the last checkpoint and waits for it. Returns "" or why it was not written. It may
        replace older ones, which is reported.

        moved: called in this thread while a write progresses.
        """
        while True:
            self._wait(moved)
            self.save(now, learner)
            self._wait(moved)
            if (failure := self.last_failure(now)) is not None:
                return failure

    def last_failure(self, now: TrainState) -> str | None:
        """After save() of the last checkpoint: "" once it is on disk, the reason if it will not be
        written, or None if it should be tried again."""
        self._collect(training=False, given_up=self._given_up)
        if self.newest == (now.progress.step, now.evaluated):
            return ""
        assert self._result
        self._last_attempts += 1
        if self._result.failure.startswith(room.NO_ROOM):
            step = room.give_up_one(
                self._run, self._result.needed_bytes, self._config.keep_best, self._limit_bytes
            )
            if step is not None:
                self._given_up.append(step)
                return None
        elif self._last_attempts == 1:
            return None
        return self._result.failure

    def wants(self, now: TrainState) -> bool:
        """Whether save() would write; waits for the previous write."""
        self._collect()
        return (now.progress.step, now.evaluated) != self.newest or (
            now.is_kept and now.progress.step != self._kept_step
        )

    def close(self) -> None:
        """Waits for a pending write."""
        self._collect()

    def is_writing(self, wait_s: float) -> bool:
        """Whether a write is still pending after wait_s."""
        if self._thread is not None:
            self._thread.join(wait_s)
        return self._thread is not None and self._thread.is_alive()

    def _wait(self, moved: Callable[[], None]) -> None:
        is_writing = True
        before = self.moves
        while is_writing:
            is_writing = self.is_writing(LOOK_S)
            if self.moves != before:
                before = self.moves
                moved()

    def _move(self) -> None:
        self.moves += 1

    def _write(
        self, now: TrainState, arrays: Arrays | WrittenByAll, names: dict[str, str], pause_s: float
    ) -> None:
        """Writes a checkpoint, in the thread: the only place that touches the disk."""
        began = time.perf_counter()
        step = now.progress.step
        array_bytes = (
            arrays.nbytes
            if isinstance(arrays, WrittenByAll)
            else sum(array.nbytes for array in arrays.values())
        )
        failure = ""
        note = ""
        needed_bytes = room.needed_bytes(array_bytes)
        try:
            if not isinstance(arrays, WrittenByAll):  # each rank checks its arrays
                check_finite(arrays)
            names = {} if names == plain_names(arrays) else names
            folder = files.write(
                self._run, now, arrays, self._identity, names, self._open_run, self._move
            )
            with contextlib.suppress(
                OSError
            ):  # files that cannot be removed now are removed after the next checkpoint
                prune.prune(
                    self._run,
                    self._config.keep_last,
                    self._config.keep_best,
                    folder,
                    self._open_run,
                )
            note = self._config_note()
        except (Diverged, UserError) as error:
            failure = error.what
        except OSError as error:
            failure = room.describe(error, self._run, needed_bytes)
        except MemoryError:
            failure = f"{room.NO_MEMORY} to write a checkpoint of {array_bytes / 1e6:.1f} MB"
        except Exception as error:
            # reported in the main thread as a failed write: training must not lose its writer
            # unnoticed
            failure = f"{type(error).__name__}: {error}"
        write_s = time.perf_counter() - began
        self._result = WriteResult(
            step, now.evaluated, pause_s, write_s, array_bytes / 1e6, failure, note, needed_bytes
        )

    def _config_note(self) -> str:
        """Records the configuration after the first checkpoint trained with it; returns "" or why
        that failed."""
        if self._record_config is None:
            return ""
        try:
            self._record_config()
        except OSError as error:
            return (
                f"cannot write config.yaml: {error.strerror or error}; it is still the "
                "configuration before this start"
            )
        self._record_config = None
        return ""

    def _collect(self, training: bool = True, given_up: Sequence[int] = ()) -> None:
        """Waits for the pending write and emits its event. training: whether a line reports that
        training continues.

        given_up: steps of checkpoints removed to make room for it.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        done = self._result
        assert done is not None
        self._failed = bool(done.failure)
        self.measured_s = max(self.measured_s, done.pause_s + done.write_s)
        self.longest_s = max(self.longest_s, self.measured_s)
        if done.failure:
            self._log.emit(
                "checkpoint_failed",
                done.step,
                reason=done.failure,
                lines=[self._failure_line(done)] * training,
            )
            return
        self.newest = (done.step, done.evaluated)
        self._told = ""
        sizes = {
            "pause_s": round(done.pause_s, 6),
            "write_s": round(done.write_s, 6),
            "megabytes": round(done.megabytes, 3),
        }
        lines = [done.note] if done.note else []
        if self._auto is not None:
            changed = self._auto.measured(done.pause_s, done.write_s)
            sizes["every_s"] = round(self._auto.seconds, 3)
            lines += [changed] if changed else []
        if given_up:
            steps = ", ".join(map(str, given_up))
            lines.append(
                f"{room.NO_ROOM} for the last checkpoint beside all others: the checkpoint of step "
                f"{steps} was removed for it"
            )
        more = {"given_up": list(given_up)} if given_up else {}
        self._log.emit(
            "checkpoint", done.step, **sizes, **more, **({"lines": lines} if lines else {})
        )

    def _failure_line(self, done: WriteResult) -> str:
        """Returns the full reason once; while the reason stays the same, only that there is still
        no checkpoint."""
        kind = done.failure.partition(":")[0]
        former = self._told
        self._told = kind
        if kind == former:
            since = f"since step {self.newest[0]}" if self.newest[0] >= 0 else "of this run"
            return f"no checkpoint of step {done.step}: still none {since}"
        last = (
            f"the newest is of step {self.newest[0]}"
            if self.newest[0] >= 0
            else "there is none of this run yet"
        )
        return (
            f"no checkpoint of step {done.step}: {done.failure}; {last}; training continues, and "
            f"tries again every {RETRY_S:.0f} s"
        )
