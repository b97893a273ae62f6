"""When rank 0 writes a checkpoint, and the thread that writes it: training waits for a copy of the state only."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hvdtrain.config import CheckpointConfig
from hvdtrain.frames.learner import Learner, plain_names
from hvdtrain.report.log import Log
from hvdtrain.run import checkpoint
from hvdtrain.run.checkpoint import Identity
from hvdtrain.run.standing import Standing
from hvdtrain.state import Arrays

RETRY_S = 30.0  # after a write that failed


class Written(NamedTuple):
    """One write, over."""

    step: int
    pause_s: float  # that training waited
    write_s: float
    megabytes: float
    failure: str = ""  # why it is not there


class Saver:
    """Of rank 0 alone. offer() at every meeting of the ranks; it holds no collective. Speaks through the log, in the main thread."""

    def __init__(
        self, run: Path, config: CheckpointConfig, identity: Identity, log: Log, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._run, self._config, self._identity, self._log, self._clock = run, config, identity, log, clock
        self._thread: threading.Thread | None = None
        self._result: Written | None = None
        self._tried = clock()  # when the last write began
        self._failed = False
        self.newest = -1  # the step of the newest checkpoint on the disk, of this run's
        self.longest_s = 0.0  # pause and write together

    def go_on(self, step: int) -> None:
        """The checkpoint that the job goes on from is not written again, where it is this run's: there would be a moment without it."""
        if any(folder.name == checkpoint.name_of(step) for folder in checkpoint.finished(self._run)):
            self.newest = step

    def offer(self, now: Standing, learner: Learner) -> None:
        """Writes in the background, if one is due."""
        if self._thread and not self._thread.is_alive():
            self._collect()
        if self._due(now):
            self.save(now, learner)

    def save(self, now: Standing, learner: Learner) -> None:
        """Waits for the write before, takes a copy, and goes on; what is on the disk already is not written again."""
        began = time.perf_counter()
        self._collect()
        if now.progress.step == self.newest:
            return
        arrays = learner.state()  # the host copy, and on a GPU the wait for the device
        names = learner.published()
        self._tried = self._clock()
        pause_s = time.perf_counter() - began
        self._thread = threading.Thread(target=self._write, args=(now, arrays, names, pause_s), name="checkpoint")
        self._thread.start()

    def finish(self, now: Standing, learner: Learner) -> str:
        """The last checkpoint is on the disk when this returns; else why it is not."""
        for _ in range(2):
            self.save(now, learner)
            self._collect()
            if self.newest == now.progress.step:
                return ""
        return self._result.failure if self._result else ""

    def close(self) -> None:
        """Waits for a write that is under way."""
        self._collect()

    def _due(self, now: Standing) -> bool:
        step, every_steps, every_minutes = now.progress.step, self._config.every_steps, self._config.every_minutes
        if step == self.newest:
            return False
        waited_s = self._clock() - self._tried
        return (
            now.evaluated == step
            or (every_steps is not None and step % every_steps == 0)
            or (every_minutes is not None and waited_s >= 60 * every_minutes)
            or (self._failed and waited_s >= RETRY_S)
        )

    def _write(self, now: Standing, arrays: Arrays, names: dict[str, str], pause_s: float) -> None:
        """In the thread: the only place that touches the disk."""
        began, step = time.perf_counter(), now.progress.step
        megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
        failure = ""
        try:
            folder = checkpoint.write(self._run, now, arrays, self._identity, {} if names == plain_names(arrays) else names)
            with contextlib.suppress(OSError):  # what could not be removed now is removed after the next one
                checkpoint.prune(self._run, self._config.keep_last, self._config.keep_best, folder)
        except OSError as error:
            failure = f"{error.strerror or error}"
        except Exception as error:  # told in the main thread, as a failed write: training must not lose its writer in silence
            failure = f"{type(error).__name__}: {error}"
        self._result = Written(step, pause_s, time.perf_counter() - began, megabytes, failure)

    def _collect(self) -> None:
        """The result of the last write, told once."""
        if self._thread is None:
            return
        self._thread.join()
        self._thread, done = None, self._result
        assert done is not None
        self._failed = bool(done.failure)
        self.longest_s = max(self.longest_s, done.pause_s + done.write_s)
        if done.failure:
            last = f"the newest is of step {self.newest}" if self.newest >= 0 else "there is none of this run yet"
            line = f"no checkpoint of step {done.step}: {done.failure}; {last}; training goes on, and tries again after {RETRY_S:.0f} s"
            self._log.emit("checkpoint_failed", done.step, reason=done.failure, lines=[line])
            return
        self.newest = done.step
        sizes = {"pause_s": round(done.pause_s, 6), "write_s": round(done.write_s, 6), "megabytes": round(done.megabytes, 3)}
        self._log.emit("checkpoint", done.step, **sizes)
