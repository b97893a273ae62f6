"""The terminal: the display that updates in place, plain lines without control codes elsewhere, and the end of both."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import IO, Any

import pytest
from ranks import ROOT, environment, needs_mpirun

from hvdtrain.config.schema import LogConfig
from hvdtrain.events.log import Event
from hvdtrain.events.progress_display import ProgressDisplay, duration
from hvdtrain.events.terminal import TerminalSink, is_interactive, terminal_sink
from hvdtrain.events.writers import TextWriter

START = Event(0.0, "start", 0, {"lines": ["ranks   1", "model   " + "word " * 30], "samples": 640, "max_steps": None})
STEP: dict[str, Any] = {
    "epochs": 1.5, "of": 3, "loss": 0.25, "accuracy": 0.875, "images_per_s": 1234.4, "lr": 0.02, "batch": 64, "seconds": 9.0,
    "phase_ms": {"data": 1.0, "forward": 5.0, "backward": 10.0, "communication": 3.0, "other": 1.0}, "memory_mb": 1500.0, "watts": 321.4,
    "work_ms": [16.0, 16.0, 20.0], "slowest_rank": 3, "slowest_host": "n2",
}  # fmt: skip
EPOCH: dict[str, Any] = {
    "epoch": 1, "seconds": 5.0, "epoch_s": 4.0, "images_per_s": 160.0, "train_loss": 0.5, "val_loss": 0.4, "val_accuracy": 0.75,
    "best_accuracy": 0.8, "lr": 0.02,
}  # fmt: skip
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class FakeTerminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def shown(display: ProgressDisplay) -> str:
    """What the display has now, on a terminal of 80 columns."""
    return display.render(80).plain


def test_the_display_shows_the_newest_metrics() -> None:
    out = FakeTerminal()
    sink = ProgressDisplay(out)
    assert "the first metrics come with log.every_steps" in shown(sink)
    sink(START)
    sink(Event(1.0, "step", 5, {**STEP, "epochs": 0.5}))
    sink(Event(2.0, "epoch", 10, EPOCH))
    sink(Event(3.0, "step", 15, STEP))
    text = shown(sink)
    sink.close(0)
    assert re.search(r"epoch 2 of 3 +━.* 5 of 10 steps", text), text
    assert re.search(r"job +step 15 +━.* 50%, 0:\d\d left", text), text
    for metric in (
        "images/s 1,234",
        "loss 0.2500",
        "accuracy 0.8750",
        "val acc 0.7500",
        "best 0.8000",
        "lr 0.02",
        "batch 64",
        "step 20.0 ms",
    ):
        assert metric in text, text
    for metric in ("waiting for data 5.0%", "for gradients 15.0%", "memory 1.50 GB", "power 321 W"):
        assert metric in text, text
    assert "slowest rank 3 on n2, 1.25 x the median" in text
    written = CODES.sub("", out.getvalue())
    assert "ranks   1\n" in written and "\n        word word" in written, "long lines go on under their first word"
    assert "    1      5.0      4.0       160      0.5000    0.4000   0.7500     0.02\n" in written
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l"), "the cursor is visible again"


def test_max_steps_bounds_the_job_bar_and_equal_ranks_have_no_slowest() -> None:
    sink = ProgressDisplay(FakeTerminal())
    sink(START._replace(fields={**START.fields, "max_steps": 20}))
    sink(Event(1.0, "step", 5, {**STEP, "epochs": 0.5, "work_ms": [16.0, 16.0, 17.0]}))
    text = shown(sink)
    sink.close(0)
    assert re.search(r"step 5 .* 25%, \? left", text) and "slowest" not in text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (3600, "1:00:00"), (90061, "1 day 1:01:01"), (200000, "2 days 7:33:20")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


NAMED = Event(3.0, "end", 15, {"lines": ["done", "run folder: runs/日本-é"]})


@pytest.mark.parametrize("errors", ["strict", "backslashreplace"])  # a script's output, and that of the command line
@pytest.mark.parametrize(
    ("encoding", "written_name"), [("latin-1", r"\u65e5\u672c-é"), ("ascii", r"\u65e5\u672c-\xe9"), ("utf-8", "日本-é")]
)
def test_letters_that_an_encoding_lacks_are_written_as_escapes(encoding: str, written_name: str, errors: str) -> None:
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding=encoding, errors=errors)
    for sink in (live := ProgressDisplay(out), TextWriter(out, 0.0)):
        for event in (START, Event(1.0, "step", 5, STEP), NAMED):
            sink(event)
    text = shown(live)
    live.close(0)
    assert re.search("job +step 5 " + ("━+─+ 50%" if encoding == "utf-8" else "#+-+ 50%"), text), text
    out.flush()
    assert written.getvalue().decode(encoding).count(f"run folder: runs/{written_name}\n") == 2


def test_a_file_name_that_is_not_utf_8() -> None:
    out = io.TextIOWrapper(written := io.BytesIO(), encoding="utf-8")
    TextWriter(out, 0.0)(Event(0.0, "end", 1, {"lines": ["runs/\udcff"]}))
    assert written.getvalue() == b"runs/\\udcff\n"


def test_a_failing_output_is_reported_once_and_training_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    sink = terminal_sink(out, LogConfig(display="lines"))
    sink(START)
    out.close()
    for event in (NAMED, NAMED):
        sink(event)
    sink.close(0)
    line = (
        "hvdtrain: cannot write to the standard output: ValueError: I/O operation on closed file; "
        "training goes on, events.jsonl has every event\n"
    )
    assert capsys.readouterr() == ("", line)

    def without_reader(event: Event) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        TerminalSink(without_reader)(NAMED)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [(["--print-config"], "run: 日本"), (["framework=numpy", "model.name=linear", "max_steps=2"], "run folder: \\u65e5\\u672c")],
    ids=["config", "job"],
)
def test_the_command_line_writes_every_name(tmp_path: Path, arguments: list[str], line: str) -> None:
    """A configuration as it is read, in UTF-8."""
    env = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *arguments, "run=日本"], capture_output=True, env=env, cwd=tmp_path, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"") and f"\n{line}\n".encode() in done.stdout, done


def pseudo_terminal(columns: int) -> tuple[int, IO[str]]:
    """The two ends of a pseudo-terminal of so many columns: the master and the terminal."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    return master, os.fdopen(terminal, "w")


def test_a_terminal_with_a_size_is_interactive_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm")
    (a, watched), (b, unseen) = pseudo_terminal(80), pseudo_terminal(0)
    with watched, unseen, (tmp_path / "log").open("w") as file:
        assert is_interactive(watched)
        assert not is_interactive(unseen), "Open MPI gives ranks a terminal without a size where its output is a pipe"
        assert not is_interactive(file) and not is_interactive(io.StringIO()) and not is_interactive(None)
        assert isinstance(terminal_sink(watched, LogConfig()).sink, ProgressDisplay)
        assert isinstance(terminal_sink(file, LogConfig()).sink, TextWriter)
        assert isinstance(terminal_sink(watched, LogConfig(display="lines")).sink, TextWriter)
        assert isinstance(terminal_sink(file, LogConfig(display="live")).sink, ProgressDisplay)
        monkeypatch.setenv("TERM", "dumb")
        assert not is_interactive(watched)
    os.close(a)
    os.close(b)


def run_in_terminal(command: list[str], columns: int) -> tuple[int, str]:
    """Runs a program in an interactive terminal: its exit code and its output."""
    master, terminal = pseudo_terminal(columns)
    env = {**environment(), "TERM": "xterm-256color"}
    job = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=env, start_new_session=True)
    terminal.close()
    text, limit_s = b"", time.monotonic() + 90
    try:
        while time.monotonic() < limit_s:
            if select.select([master], [], [], 0.5)[0]:
                try:
                    text += os.read(master, 65536)
                except OSError:  # the terminal is closed
                    break
        return job.wait(10), text.decode(errors="replace")
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        os.close(master)


def test_a_terminal_that_goes_away_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = pseudo_terminal(80)
    sink = ProgressDisplay(terminal)
    sink(START)
    sink(Event(1.0, "step", 5, STEP))
    os.close(master)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(terminal.fileno(), b"x")
    sink(Event(2.0, "epoch", 10, EPOCH))
    sink._live.refresh()
    sink(Event(3.0, "end", 10, {"lines": ["done"]}))
    sink.close(0)
    os.close(terminal.fileno())
    with contextlib.suppress(OSError):
        terminal.close()


@needs_mpirun
def test_under_mpirun_the_display_updates_in_a_terminal_and_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    from ranks import mpirun_path

    command = [str(mpirun_path()), "-np", "2", sys.executable, "-m", "hvdtrain", "comm.engine=mpi", "model.name=mlp", "epochs=3"]
    code, text = run_in_terminal([*command, f"run={tmp_path / 'one'}"], 100)
    plain = CODES.sub("", text)
    assert code == 0, text
    assert "\x1b[2K" in text and "━" in text and "images/s" in plain and re.search(r"job +step \d+", plain)
    assert re.search(r"best     0\.\d{4} in epoch \d", plain) and "run folder: " in plain
    piped = subprocess.run(
        ["bash", "-c", '"$@" | cat', "bash", *command, f"run={tmp_path / 'two'}"],
        capture_output=True,
        text=True,
        env={**environment(), "TERM": "xterm"},
        timeout=90,
        check=False,
    )
    assert piped.returncode == 0 and "\x1b" not in piped.stdout and "\r" not in piped.stdout and "━" not in piped.stdout, piped.stdout
    row = re.compile(r"[123] +\d+\.\d +\d+\.\d +\d+ +(\d\.\d{4} +\d\.\d{4} +\d\.\d{4}) ")
    assert len(row.findall(plain)) == 3 and row.findall(plain) == row.findall(piped.stdout), "one plain line for each epoch"
