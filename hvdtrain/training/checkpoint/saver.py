"""When rank 0 writes a checkpoint, and the thread that writes it: training waits for a copy of the state only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hvdtrain.config.schema import CheckpointConfig
from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import Diverged
from hvdtrain.events.log import Log
from hvdtrain.frameworks.learner import Learner
from hvdtrain.frameworks.state import plain_names
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.files import Identity
from hvdtrain.training.progress.train_state import TrainState

RETRY_S = 30.0  # after a write that failed
SLOW_DISK = 1e8  # bytes a second


class WriteResult(NamedTuple):
    """What became of one write."""

    step: int
    evaluated: int  # as TrainState's
    pause_s: float  # that training waited
    write_s: float
    megabytes: float
    failure: str = ""  # why it is not there


def check_finite(arrays: Arrays) -> None:
    """Raises Diverged where a weight or optimizer state is not finite. A buffer may hold infinity on purpose, as a mask does."""
    for name, array in arrays.items():
        if not name.startswith("b.") and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise Diverged(f"{name} is not finite", "checkpoint", "a lower optim.base_lr; the checkpoint before is good")


class Saver:
    """Of rank 0 alone. Call save_if_due() after every sync point; no collective is inside. It emits events in the main thread only.

    size_bytes: of a checkpoint, to guess how long the first one takes.
    """

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        identity: Identity,
        log: Log,
        clock: Callable[[], float] = time.monotonic,
        size_bytes: int = 0,
    ) -> None:
        self._run, self._config, self._identity, self._log, self._clock = run, config, identity, log, clock
        self._thread: threading.Thread | None = None
        self._result: WriteResult | None = None
        self._tried_s = clock()  # when the last write began
        self._failed = False
        self._due_step = -1  # the last step that was due
        self.newest = (-1, 0)  # (step, step of its last evaluation) of the newest checkpoint of this run on the disk
        self.longest_s = size_bytes / SLOW_DISK  # pause and write together

    def resume_from(self, now: TrainState) -> None:
        """A checkpoint of this run that the job goes on from is not written again: for a moment there would be none."""
        if any(folder.name == files.name_of(now.progress.step) for folder in files.finished(self._run)):
            self.newest = (now.progress.step, now.evaluated)

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due at the sync point after `step` steps; call it before, so that the ranks are compared there."""
        if self._thread and not self._thread.is_alive():
            self._collect()
        every_steps, every_minutes = self._config.every_steps, self._config.every_minutes
        waited_s = self._clock() - self._tried_s
        due = (
            (every_steps is not None and step % every_steps == 0)
            or (every_minutes is not None and waited_s >= 60 * every_minutes)
            or (self._failed and waited_s >= RETRY_S)
        )
        if due:
            self._due_step = step
        return due

    def save_if_due(self, now: TrainState, learner: Learner) -> None:
        """Writes in the background, where it is due and after an evaluation."""
        if now.progress.step in (self._due_step, now.evaluated):
            self.save(now, learner)

    def save(self, now: TrainState, learner: Learner) -> None:
        """Waits for the write before this one, copies the state, and writes in the background; not what is on the disk already."""
        began = time.perf_counter()
        self._collect()
        if (now.progress.step, now.evaluated) == self.newest:
            return
        arrays = learner.state()  # the host copy, and on a GPU the wait for the device
        names = learner.state_dict_names()
        self._tried_s = self._clock()
        pause_s = time.perf_counter() - began
        self._thread = threading.Thread(target=self._write, args=(now, arrays, names, pause_s), name="checkpoint")
        self._thread.start()

    def finish(self, now: TrainState, learner: Learner) -> str:
        """Returns once the last checkpoint is on the disk: empty, or why it is not there."""
        for _ in range(2):
            self.save(now, learner)
            self._collect(training=False)
            if self.newest == (now.progress.step, now.evaluated):
                return ""
        return self._result.failure if self._result else ""

    def close(self) -> None:
        """Waits for a write that is under way."""
        self._collect()

    def _write(self, now: TrainState, arrays: Arrays, names: dict[str, str], pause_s: float) -> None:
        """In the thread: the only place that touches the disk."""
        began, step = time.perf_counter(), now.progress.step
        megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
        failure = ""
        try:
            check_finite(arrays)
            folder = files.write(self._run, now, arrays, self._identity, {} if names == plain_names(arrays) else names)
            with contextlib.suppress(OSError):  # what could not be removed now is removed after the next one
                files.prune(self._run, self._config.keep_last, self._config.keep_best, folder)
        except Diverged as error:
            failure = error.what
        except OSError as error:
            failure = f"{error.strerror or error}"
        except Exception as error:  # reported in the main thread as a failed write: training must not lose its writer unnoticed
            failure = f"{type(error).__name__}: {error}"
        self._result = WriteResult(step, now.evaluated, pause_s, time.perf_counter() - began, megabytes, failure)

    def _collect(self, training: bool = True) -> None:
        """Waits for the write that is under way, and emits its event; without `training` no line says that training goes on."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, done = None, self._result
        assert done is not None
        self._failed = bool(done.failure)
        self.longest_s = max(self.longest_s, done.pause_s + done.write_s)
        if done.failure:
            last = f"the newest is of step {self.newest[0]}" if self.newest[0] >= 0 else "there is none of this run yet"
            line = f"no checkpoint of step {done.step}: {done.failure}; {last}; training goes on, and tries again after {RETRY_S:.0f} s"
            self._log.emit("checkpoint_failed", done.step, reason=done.failure, lines=[line] * training)
            return
        self.newest = (done.step, done.evaluated)
        sizes = {"pause_s": round(done.pause_s, 6), "write_s": round(done.write_s, 6), "megabytes": round(done.megabytes, 3)}
        self._log.emit("checkpoint", done.step, **sizes)
