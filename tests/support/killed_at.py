"""Jobs of one process that SIGKILL themselves before call number n of a checkpoint: `killed_at.py
FOLDER` tries every n; JSON lines out.

The calls are those at the border to the operating system, in the thread that writes. Every job is
forked from this process, which has trained once: nothing is left to import.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import events, outcome

from hvdtrain.__main__ import main
from hvdtrain.errors import DONE, UserError
from hvdtrain.training.checkpoint.resume import newest_good

WORDS = [
    "framework=numpy",
    "model.name=linear",
    "comm.engine=single",
    "optim.name=adam",
    "epochs=3",
    "checkpoint.every_steps=4",
]
# one checkpoint alone, which is there from the first step on
ONE_CHECKPOINT = [
    "checkpoint.keep_last=1",
    "guard.nonfinite=rollback",
]
# 4 steps are an epoch
DATA = [
    "data.name=synthetic",
    "data.shape=[8,8,1]",
    "data.samples=32",
    "batch.size=8",
]
# an evaluation checks for signals, too
STOPPABLE = [
    "data.val_samples=8",
    "batch.evaluate=1",
    "log.every_s=0",
    "log.every_steps=4",
]
LIMIT_BYTES = 2**20
CALLS = ("mkdir", "open", "fsync", "rename", "unlink", "rmdir")
RANDOM_PART = re.compile(r"\.[0-9a-f]{16}(?=\.)")  # of a temporary name


class Killer:
    """Kills this process before call `at` of checkpoint `write`, both counted from 1; 0 kills
    never. A write has its own thread."""

    def __init__(self, write: int, at: int) -> None:
        self.write = write
        self.at = at
        self.writes = 0
        self.calls = list[str]()
        self.writer: threading.Thread | None = None

    def reach(self, call: str, path: Any) -> None:
        thread = threading.current_thread()
        if thread.name != "checkpoint":
            return
        if thread is not self.writer:
            self.writer = thread
            self.writes = self.writes + 1
        if self.writes == self.write:
            self.calls.append(f"{call} {RANDOM_PART.sub('', _path(path).name)}")
            if len(self.calls) == self.at:
                os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self) -> None:
        """Puts reach() before what touches the disk."""
        for name in CALLS:
            setattr(os, name, self._before(name, getattr(os, name)))
        io.FileIO = self._file(io.FileIO)  # type: ignore[assignment,misc]

    def _before(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *rest: Any, **more: Any) -> Any:
            if name != "open" or rest[0] & os.O_CREAT:
                self.reach(name, path)
            return call(path, *rest, **more)

        return wrapped

    def _file(self, plain: type[io.FileIO]) -> Callable[..., io.FileIO]:
        def wrapped(handle: Any, mode: str = "r", *rest: Any, **more: Any) -> io.FileIO:
            if mode == "r" or threading.current_thread().name != "checkpoint":
                return plain(handle, mode, *rest, **more)
            return Torn(self, handle, mode)

        return wrapped


class Torn(io.FileIO):
    """A file whose writer may die with half of it written."""

    def __init__(self, killer: Killer, handle: int, mode: str) -> None:
        super().__init__(handle, mode)
        self._killer = killer
        self._handle = handle

    def write(self, data: Any) -> int:
        self._killer.reach("write", self._handle)
        half = super().write(data[: len(data) // 2])
        self._killer.reach("write, half written,", self._handle)
        return half + super().write(data[half:])

    def close(self) -> None:
        if not self.closed:
            self._killer.reach("close", self._handle)
        super().close()


def _path(path: Any) -> Path:
    """Returns the path of a path or of an open file."""
    return Path(os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path)


class SignalOnPrint(io.StringIO):
    """A standard output that sends this process a signal when the line of step 8 is written, before
    an evaluation."""

    def write(self, text: str) -> int:
        if text.startswith("  step 8,"):
            signal.raise_signal(signal.SIGUSR2)
        return super().write(text)


def command(run: Path) -> list[str]:
    return [*WORDS, *ONE_CHECKPOINT, *DATA, *STOPPABLE, f"run={run}"]


def run_job(run: Path, write: int = 0, at: int = 0, *, stop: bool = False) -> int:
    """Runs the job in a new process: its exit code, or minus the signal that ended it. `stop`: in
    the evaluation after step 8."""
    child = os.fork()
    if not child:
        killer = Killer(write, at)
        sys.stdout = SignalOnPrint() if stop else io.StringIO()
        killer.wrap()
        code = main(command(run))
        (run.parent / "calls").write_text(json.dumps(killer.calls))
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def tries(begin: Path, write: int, first: int = 1, last: int = 1000) -> None:
    """One trial for each call, `first` to `last`, of checkpoint `write` of a job that continues the
    run `begin`, if that exists."""
    top = Path(sys.argv[1])
    folder = top / f"trial-{begin.name}"
    at = first
    killed = True
    while killed and at <= last:
        run = copy(begin, folder)
        killed = run_job(run, write, at) == -signal.SIGKILL
        calls = [] if killed else json.loads((folder / "calls").read_text())
        found = {"begin": begin.name, "at": at, "killed": killed, "good": good(run), "calls": calls}
        begun = len(events(run))
        found["code"] = run_job(run)
        found["starts"] = [e["step"] for e in events(run)[begun:] if e["kind"] == "start"]
        found["left"] = sorted(path.name for path in (run / "checkpoints").iterdir())
        with results_file(begin).open("a") as file:
            print(
                json.dumps(found | {"equal": outcome(run) == outcome(top / "straight")}), file=file
            )
        at += 1


def results_file(begin: Path) -> Path:
    """The results of the trials from `begin`: several processes on one output would mix their
    lines."""
    return begin.parent / f"{begin.name}.jsonl"


def copy(begin: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    if begin.exists():
        shutil.copytree(begin, folder / "run")
    return folder / "run"


def good(run: Path) -> int:
    """Returns the step of the newest good checkpoint; 0 if there is none."""
    try:
        return newest_good(run, LIMIT_BYTES)[0].train_state.progress.step
    except UserError:
        return 0


def all_tries(folder: Path) -> None:
    """The checkpoint of step 8 of a new job, the first one of a job that was stopped in the
    evaluation after it, and the removal of one that is torn. The last job resumes from a complete
    checkpoint and is not killed: this checkpoint must stay until the next one exists.
    """
    with contextlib.redirect_stdout(None):
        assert main(command(folder / "straight")) == DONE
    for name, write, at in (("torn", 3, 20), ("whole", 4, 1), ("stopped", 0, 0)):
        run_job(copy(folder / "new", folder / f"before-{name}"), write, at, stop=name == "stopped")
        (folder / f"before-{name}" / "run").rename(folder / name)
    plan = [("new", 3), ("stopped", 1), ("torn", 1, 1, 10), ("whole", 1, 1000)]
    children = [in_child(tries, folder / name, *arguments) for name, *arguments in plan]
    failed = [os.waitpid(child, 0)[1] for child in children]
    for name, *_ in plan:
        sys.stdout.write(results_file(folder / str(name)).read_text())
    sys.exit(any(failed))


def in_child(work: Callable[..., None], *arguments: Any) -> int:
    if child := os.fork():
        return child
    work(*arguments)
    os._exit(0)


if __name__ == "__main__":
    all_tries(Path(sys.argv[1]))
