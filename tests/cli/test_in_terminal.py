"""Jobs in a terminal of their own: Ctrl-C and a terminal that goes away stop them with a
checkpoint, also under `launch` on two ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from ranks import environment, mpirun_path, needs_extra, needs_mpirun

from hvdtrain.errors import REQUEUE

JOB = [
    "framework=numpy",
    "model.name=linear",
    "epochs=1000000",
    "log.every_steps=5",
    "log.every_s=0.2",
]
NO_SYNC_POINT = [
    "log.every_steps=1000000",
    "data.name=synthetic",
    "data.shape=[2,2,1]",
    "data.samples=1000000",
    "batch.size=2",
]
LAUNCH = ["launch", "-np", "2", "--"]
LAUNCH_MPI = [*LAUNCH, "comm.engine=mpi"]
NEEDS_LAUNCH = [needs_mpirun, needs_extra("launch")]
NUM_GPUS = pytest.param(
    ["--num-gpus", "2"], id="num-gpus", marks=[pytest.mark.slow, needs_extra("launch")]
)
LIMIT_S = 300.0  # for what comes within seconds on an idle machine
HOME_AND_CLEAR = "\x1b[H\x1b[2J"
IN_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in (signal.SIGINT, signal.SIGHUP):  # tests in the background of a shell, or of nohup, ignore them
    signal.signal(number, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""  # noqa: E501


class Terminal:
    """A program with a controlling terminal of 100 columns; leaving the block closes the terminal
    and kills the program."""

    def __init__(self, command: list[str], env: dict[str, str] | None = None) -> None:
        self.master, slave = os.openpty()
        self.resize(100)
        files = {"stdin": slave, "stdout": slave, "stderr": slave}
        with contextlib.closing(os.fdopen(slave)):
            self.process = subprocess.Popen(
                [sys.executable, "-c", IN_TERMINAL, *command],
                **files,
                env=environment(env),
                start_new_session=True,
            )
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
        self.process.kill()
        self.process.wait()

    def resize(self, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def close(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def read_until(self, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
        """Reads what the program prints until the condition holds, or the program ends."""
        end_s = time.monotonic() + limit_s
        while not condition() and time.monotonic() < end_s:
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.text += os.read(self.master, 65536).decode(errors="replace")
                except OSError:  # the program has ended
                    return

    def end(self) -> int:
        """Reads to the end, and returns the exit code."""
        if self.master >= 0:
            self.read_until(lambda: False)
        return self.process.wait(LIMIT_S)


def start(
    arguments: list[str], run: Path, env: dict[str, str] | None = None, more: Sequence[str] = ()
) -> Terminal:
    return Terminal(
        [sys.executable, "-m", "hvdtrain", *arguments, *JOB, *more, f"run={run}"],
        {"TERM": "dumb", **(env or {})},
    )


def events(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def assert_stopped_with_checkpoint(run: Path) -> None:
    last = events(run)[-1]
    assert (last["kind"], last["exit_code"]) == ("stop", REQUEUE), last
    assert list(run.glob(f"checkpoints/step-{last['step']:08d}/weights.safetensors"))


@pytest.mark.in_turn
@pytest.mark.parametrize(
    "how",
    [
        pytest.param([], id="alone"),
        pytest.param(LAUNCH_MPI, id="launch", marks=NEEDS_LAUNCH),
        NUM_GPUS,
    ],
)
def test_ctrl_c_stops_with_a_checkpoint(tmp_path: Path, how: list[str]) -> None:
    run = tmp_path / "run"
    with start(how, run) as terminal:
        # an epoch is done
        terminal.read_until(lambda: re.search(r"\n +\d+ +\d+\.\d ", terminal.text))
        terminal.press(b"\x03")
        code = terminal.end()
    assert code == REQUEUE, terminal.text
    assert terminal.text.count("stopping at the next sync point; again to kill") == 1, terminal.text
    assert re.search(r"stopped \(SIG(INT|USR2)\) at step \d+", terminal.text), terminal.text
    assert_stopped_with_checkpoint(run)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param([], id="alone"),
        pytest.param(LAUNCH_MPI, id="launch", marks=[*NEEDS_LAUNCH, pytest.mark.slow]),
        NUM_GPUS,
    ],
)
def test_a_terminal_that_goes_away_stops_with_a_checkpoint(tmp_path: Path, how: list[str]) -> None:
    """As when an ssh connection breaks."""
    run = tmp_path / "run"
    with start(how, run) as terminal:
        terminal.read_until(lambda: re.search(r"\n +\d+ +\d+\.\d ", terminal.text))
        terminal.close()
        code = terminal.end()
    assert code == REQUEUE
    assert_stopped_with_checkpoint(run)


@pytest.mark.slow
@needs_mpirun
@needs_extra("launch")
def test_ctrl_c_again_kills_the_ranks_of_launch(tmp_path: Path) -> None:
    with start(LAUNCH_MPI, tmp_path / "run", more=NO_SYNC_POINT) as terminal:
        terminal.read_until(lambda: "run folder" in terminal.text or "\nrun " in terminal.text)
        terminal.press(b"\x03")
        terminal.read_until(lambda: "again to kill" in terminal.text)
        time.sleep(1.1)  # one that comes sooner is taken for the same
        terminal.press(b"\x03")
        assert terminal.end() == 128 + signal.SIGINT


@pytest.mark.slow
@needs_mpirun
@pytest.mark.parametrize(
    "launcher", ["mpirun", pytest.param("launch", marks=needs_extra("launch"))]
)
def test_a_terminal_of_another_size_is_drawn_again_under_mpirun(
    tmp_path: Path, launcher: str
) -> None:
    """Open MPI gives rank 0 a terminal of its own, whose size stays."""
    hvdtrain = [sys.executable, "-m", "hvdtrain"]
    start = (
        [*hvdtrain, *LAUNCH]
        if launcher == "launch"
        else [str(mpirun_path()), "-np", "2", *hvdtrain]
    )
    with Terminal(
        [*start, "comm.engine=mpi", *JOB, f"run={tmp_path / 'run'}"], {"TERM": "xterm"}
    ) as terminal:
        terminal.read_until(lambda: "images/s" in terminal.text.rpartition("epoch ")[2])
        before = len(terminal.text)
        terminal.resize(60)
        terminal.read_until(
            lambda: terminal.text[before:].partition(HOME_AND_CLEAR)[2].count("images/s") > 2
        )
        drawn = terminal.text[before:].partition(HOME_AND_CLEAR)[2]
    lines = re.split("[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn))
    assert "images/s" in drawn and 40 < max(map(len, lines)) <= 60, lines
