"""The terminal: the display that updates in place, plain lines without control codes elsewhere, and
the end of both."""

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
from ranks import HANG_S, ROOT, environment, needs_mpirun

from hvdtrain.config.sections.log import LogConfig
from hvdtrain.events.log import Event
from hvdtrain.events.progress_display import ProgressDisplay, duration
from hvdtrain.events.terminal import CAPACITY, is_interactive, terminal_sink
from hvdtrain.events.writers import OutputStream, Pace, TextWriter

START = Event(
    0.0,
    "start",
    0,
    {"lines": ["ranks   1", "model   " + "word " * 30], "samples": 640, "max_steps": None},
)
STEP: dict[str, Any] = {
    "epochs": 1.5, "of": 3, "loss": 0.25, "accuracy": 0.875, "samples_per_s": 1234.4, "lr": 0.02, "batch": 64, "seconds": 9.0,  # noqa: E501
    "phase_ms": {"data": 1.0, "forward": 5.0, "backward": 10.0, "communication": 3.0, "other": 1.0}, "memory_mb": 1500.0, "watts": 321.4,  # noqa: E501
    "work_ms": [16.0, 16.0, 20.0], "slowest_rank": 3, "slowest_host": "n2",
}  # fmt: skip
EPOCH: dict[str, Any] = {
    "epoch": 1, "epochs": 1.0, "seconds": 5.0, "epoch_s": 4.0, "samples_per_s": 160.0, "train_loss": 0.5, "val_loss": 0.4,  # noqa: E501
    "val_accuracy": 0.75, "best_accuracy": 0.8, "lr": 0.02,
}  # fmt: skip
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class FakeTerminal(io.StringIO):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


def display_on(out: IO[str], columns: int = 80) -> ProgressDisplay:
    return ProgressDisplay(OutputStream(out), lambda: os.terminal_size((columns, 40)))


def shown(display: ProgressDisplay) -> str:
    """What the display has now, on a terminal of 80 columns."""
    return display.render(80).plain


def test_lines_of_steps_wait_for_their_time_and_no_others() -> None:
    step, epoch, silent = (Event(0.0, kind, 7, {}) for kind in ("step", "epoch", "checkpoint"))
    said = silent._replace(fields={"lines": ["a word to the user"]})
    once_in_a_day = Pace(86400.0)
    always = Pace(0.0)
    assert [once_in_a_day(event) for event in (step, epoch, step, said, silent, step)] == [
        False,
        True,
        False,
        True,
        False,
        False,
    ]
    assert [always(event) for event in (step, step, epoch, said, silent)] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_the_display_shows_the_newest_metrics() -> None:
    out = FakeTerminal()
    sink = display_on(out)
    assert "the first metrics come with log.every_steps" in shown(sink)
    sink(START)
    sink(Event(1.0, "step", 5, {**STEP, "epochs": 0.5}))
    sink(Event(2.0, "epoch", 10, EPOCH))
    sink(Event(3.0, "step", 15, STEP))
    text = shown(sink)
    sink._live.stop()
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
    assert "ranks   1\n" in written and "\n        word word" in written, (
        "long lines go on under their first word"
    )
    assert "    1      5.0      4.0       160      0.5000    0.4000   0.7500     0.02\n" in written
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l"), (
        "the cursor is visible again"
    )


def test_max_steps_bounds_the_job_bar_and_equal_ranks_have_no_slowest() -> None:
    sink = display_on(FakeTerminal())
    sink(START._replace(fields={**START.fields, "max_steps": 20}))
    sink(Event(1.0, "step", 5, {**STEP, "epochs": 0.5, "work_ms": [16.0, 16.0, 17.0]}))
    text = shown(sink)
    sink.close()
    assert re.search(r"step 5 .* 25%, \? left", text) and "slowest" not in text


def test_the_display_says_which_stage_is_slowest() -> None:
    """Two ranks in each of ten stages: the mean of the shares of a stage, in a line that fits on 80
    columns."""
    waits = [0.25] * 20
    waits[12:14] = [0.35, 0.55]
    stages = {
        "bubble": waits,
        "bubble_predicted": 0.2,
        "stage_work_ms": [1000.0] * 8 + [1434.26, 900.0],
        "slowest_stage": 8,
    }
    places = [[rank // 2, 0, rank % 2] for rank in range(20)]
    sink = display_on(FakeTerminal())
    sink(START._replace(fields={**START.fields, "coordinates_of_rank": places}))
    sink(Event(1.0, "step", 5, {**STEP, "work_ms": [16.0] * 3}))
    assert "stages" not in shown(sink), "not measured yet"
    sink(Event(2.0, "step", 10, {**STEP, **stages, "slowest_rank": 17}))
    *_, slowest, line = shown(sink).splitlines()
    sink.close()
    assert slowest == "slowest rank 17 on n2, 1.25 x the median, of stage 8"
    assert line == "stages  8 is slowest, 1434.3 ms; 6 waits most, 45%; bubble 27% (schedule 20%)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (3600, "1:00:00"),
        (90061, "1 day 1:01:01"),
        (200000, "2 days 7:33:20"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


NAMED = Event(3.0, "end", 15, {"lines": ["done", "run folder: runs/日本-é"]})


@pytest.mark.parametrize(
    "errors", ["strict", "backslashreplace"]
)  # a script's output, and that of the command line
@pytest.mark.parametrize(
    ("encoding", "written_name"),
    [("latin-1", r"\u65e5\u672c-é"), ("ascii", r"\u65e5\u672c-\xe9"), ("utf-8", "日本-é")],
)
def test_letters_that_an_encoding_lacks_are_written_as_escapes(
    encoding: str, written_name: str, errors: str
) -> None:
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding=encoding, errors=errors)
    for sink in (live := display_on(out), lines := TextWriter(OutputStream(out))):
        for event in (START, Event(1.0, "step", 5, STEP), NAMED):
            sink(event)
    text = shown(live)
    live.close()
    lines.close()
    assert re.search("job +step 5 " + ("━+─+ 50%" if encoding == "utf-8" else "#+-+ 50%"), text), (
        text
    )
    out.flush()
    assert written.getvalue().decode(encoding).count(f"run folder: runs/{written_name}\n") == 2


def test_a_file_name_that_is_not_utf_8() -> None:
    out = io.TextIOWrapper(written := io.BytesIO(), encoding="utf-8")
    TextWriter(OutputStream(out))(Event(0.0, "end", 1, {"lines": ["runs/\udcff"]}))
    assert written.getvalue() == b"runs/\\udcff\n"


def test_a_failing_output_is_reported_once_and_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = io.StringIO()
    sink = terminal_sink(out, LogConfig(display="lines"))
    out.close()
    for event in (START, NAMED, NAMED):
        sink(event)
    sink.close(HANG_S)
    line = (
        "hvdtrain: the standard output: ValueError: I/O operation on closed file; training "
        "continues without it\n"
    )
    assert capsys.readouterr() == ("", line)


def test_a_reader_that_goes_away_is_reported_once_and_training_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        sink = terminal_sink(out, LogConfig(display="lines"))
        sink(START)
        first = os.read(reader, 65536)
        os.close(reader)
        for event in (NAMED, NAMED):
            sink(event)
        sink.close(HANG_S)
    assert first.startswith(b"ranks   1\n")
    assert (
        capsys.readouterr().err
        == "hvdtrain: the standard output: its reader is gone; training continues without it\n"
    )


def fill(number: int) -> int:
    """Writes until a pipe or a terminal takes no more; returns how many bytes. The kernel moves
    those of a terminal on, a moment later."""
    os.set_blocking(number, False)
    written = 0
    since = 0
    while since < 15:
        try:
            written = written + os.write(number, b"x" * (1 if since else 1024))
            since = 0
        except BlockingIOError:
            since += 1
            time.sleep(0.02 * (since > 1))
    os.set_blocking(number, True)
    return written


def read_all(number: int, until: bytes) -> bytes:
    text = b""
    while until not in text:
        text += os.read(number, 65536)
    return text


@pytest.mark.clock
def test_a_reader_that_pauses_keeps_nobody_waiting_and_is_told_how_many_lines_it_missed() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as out:
        sink = terminal_sink(out, LogConfig(display="lines", every_s=0.0))
        before = fill(writer)
        start_s = time.monotonic()
        for step in range(CAPACITY + 51):
            sink(Event(0.0, "step", step, STEP))
        sink(Event(0.0, "epoch", 10, EPOCH))
        assert time.monotonic() - start_s < 5
        text = read_all(reader, b"0.7500")[before:].decode()
        sink.close(HANG_S)
    os.close(reader)
    shown_steps = [int(step) for step in re.findall(r"step (\d+),", text)]
    (missed,) = re.findall(r"  \((\d+) lines left out: nobody read this output\)\n", text)
    assert len(shown_steps) + int(missed) == CAPACITY + 51 and shown_steps[-90:] == list(
        range(CAPACITY + 51 - 90, CAPACITY + 51)
    ), text
    assert text.count("0.7500") == 1


def test_the_end_of_a_job_waits_no_longer_than_it_may(capsys: pytest.CaptureFixture[str]) -> None:
    """A full terminal, as after Ctrl-S."""
    master, terminal = pseudo_terminal(80)
    fill(terminal.fileno())
    sink = terminal_sink(terminal, LogConfig(display="live"))
    for event in (START, Event(1.0, "step", 5, STEP), NAMED):
        sink(event)
    start_s = time.monotonic()
    sink.close(0.3)
    assert time.monotonic() - start_s > 0.2
    assert "the standard output: not finished after 0.3 s: " in capsys.readouterr().err
    os.close(master)  # the thread ends with EIO
    with contextlib.suppress(OSError):
        terminal.close()


def test_what_a_job_prints_scrolls_above_the_display(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, terminal = pseudo_terminal(80)
    monkeypatch.setattr(sys, "stdout", terminal)
    sink = terminal_sink(terminal, LogConfig())
    sink(START)
    print("of the model", end="")
    print(", twice")
    kept = sys.stdout
    sink(NAMED)
    assert sys.stdout is terminal and kept is not terminal
    sink.close(HANG_S)
    kept.write("late\n")
    terminal.flush()
    text = CODES.sub("", read_all(master, b"late").decode())
    assert "\rof the model, twice\r\n" in text, text
    assert text.count("late\r\n") == 1
    monkeypatch.undo()
    terminal.close()
    os.close(master)


def test_a_terminal_that_changes_its_size_is_drawn_again() -> None:
    """The old screen scrolls away; the newest lines that fit are there again, in the new width,
    with the display below them."""
    out = FakeTerminal()
    sizes = [os.terminal_size((80, 40))]
    sink = ProgressDisplay(OutputStream(out), lambda: sizes[-1])
    for event in (
        START,
        Event(1.0, "step", 5, STEP),
        *(Event(2.0, "epoch", n, EPOCH | {"epoch": n, "epochs": float(n)}) for n in range(20)),
    ):
        sink(event)
    sink.tick()
    assert "\x1b[H" not in out.getvalue()
    out.seek(0)
    out.truncate()
    sizes.append(os.terminal_size((50, 24)))
    sink.tick()
    scrolled, _, drawn = out.getvalue().partition("\x1b[H\x1b[2J")
    assert scrolled.endswith("\n" * 24)
    lines = CODES.sub("", drawn).split("\n")
    assert max(len(line.rpartition("\r")[2]) for line in lines) <= 50, lines
    epochs = [int(found[1]) for line in lines if (found := re.match(r"\r? *(\d+) +5\.0 ", line))]
    assert epochs == list(range(20 - len(epochs), 20)) and 1 <= len(epochs) < 10, lines
    assert any(line.startswith("job   step 19 ") for line in lines)
    sink.close()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--print-config"], "run: 日本"),
        (["framework=numpy", "model.name=linear", "max_steps=2"], "run folder: \\u65e5\\u672c"),
    ],
    ids=["config", "job"],
)
def test_the_command_line_writes_every_name(
    tmp_path: Path, arguments: list[str], line: str
) -> None:
    """A configuration as it is read, in UTF-8."""
    env = {**os.environ, "PYTHONIOENCODING": "latin-1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", *arguments, "run=日本"],
        capture_output=True,
        env=env,
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"") and f"\n{line}\n".encode() in done.stdout, (
        done
    )


def pseudo_terminal(columns: int) -> tuple[int, IO[str]]:
    """The two ends of a pseudo-terminal of so many columns: the master and the terminal."""
    master, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    return master, os.fdopen(terminal, "w")


def test_a_terminal_with_a_size_is_interactive_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm")

    def shows_display(out: IO[str], config: LogConfig) -> bool:
        sink = terminal_sink(out, config)
        sink.close(HANG_S)
        return sink._has_display

    (a, watched), (b, unseen) = pseudo_terminal(80), pseudo_terminal(0)
    with watched, unseen, (tmp_path / "log").open("w") as file:
        assert is_interactive(watched)
        assert not is_interactive(unseen), (
            "Open MPI gives ranks a terminal without a size where its output is a pipe"
        )
        assert (
            not is_interactive(file)
            and not is_interactive(io.StringIO())
            and not is_interactive(None)
        )
        assert shows_display(watched, LogConfig())
        assert not shows_display(file, LogConfig())
        assert not shows_display(watched, LogConfig(display="lines"))
        assert shows_display(file, LogConfig(display="live"))
        monkeypatch.setenv("TERM", "dumb")
        assert not is_interactive(watched)
    os.close(a)
    os.close(b)


def run_in_terminal(command: list[str], columns: int) -> tuple[int, str]:
    """Runs a program in an interactive terminal: its exit code and its output."""
    master, terminal = pseudo_terminal(columns)
    env = {**environment(), "TERM": "xterm-256color"}
    job = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
        env=env,
        start_new_session=True,
    )
    terminal.close()
    text = b""
    limit_s = time.monotonic() + HANG_S
    try:
        while time.monotonic() < limit_s:
            if select.select([master], [], [], 0.5)[0]:
                try:
                    text += os.read(master, 65536)
                except OSError:  # the terminal is closed
                    break
        return job.wait(HANG_S), text.decode(errors="replace")
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
        os.close(master)


def test_a_terminal_that_goes_away_does_not_end_the_job() -> None:
    master, terminal = pseudo_terminal(80)
    sink = ProgressDisplay(OutputStream(terminal), lambda: os.terminal_size((80, 40)))
    sink(START)
    sink(Event(1.0, "step", 5, STEP))
    os.close(master)
    with pytest.raises(OSError, match="Input/output error"):
        os.write(terminal.fileno(), b"x")
    sink(Event(2.0, "epoch", 10, EPOCH))
    sink.tick()
    sink(Event(3.0, "end", 10, {"lines": ["done"]}))
    sink.close()
    terminal.close()


@pytest.mark.in_turn
@needs_mpirun
def test_under_mpirun_the_display_updates_in_a_terminal_and_a_pipe_gets_plain_lines(
    tmp_path: Path,
) -> None:
    from ranks import mpirun_path

    command = [
        str(mpirun_path()),
        "-np",
        "2",
        sys.executable,
        "-m",
        "hvdtrain",
        "comm.engine=mpi",
        "epochs=3",
    ]
    command += ["framework=numpy", "model.name=linear"]
    code, text = run_in_terminal([*command, f"run={tmp_path / 'one'}"], 100)
    plain = CODES.sub("", text)
    assert code == 0, text
    assert (
        "\x1b[2K" in text
        and "━" in text
        and "images/s" in plain
        and re.search(r"job +step \d+", plain)
    )
    assert re.search(r"best     0\.\d{4} in epoch \d", plain) and "run folder: " in plain
    piped = subprocess.run(
        ["bash", "-c", '"$@" | cat', "bash", *command, f"run={tmp_path / 'two'}"],
        capture_output=True,
        text=True,
        env={**environment(), "TERM": "xterm"},
        check=False,
    )
    assert (
        piped.returncode == 0
        and "\x1b" not in piped.stdout
        and "\r" not in piped.stdout
        and "━" not in piped.stdout
    ), piped.stdout
    row = re.compile(r"[123] +\d+\.\d +\d+\.\d +\d+ +(\d\.\d{4} +\d\.\d{4} +\d\.\d{4}) ")
    assert len(row.findall(plain)) == 3 and row.findall(plain) == row.findall(piped.stdout), (
        "one plain line for each epoch"
    )


def test_an_evaluation_within_an_epoch_and_a_job_that_its_time_ends() -> None:
    out = FakeTerminal()
    sink = display_on(out)
    sink(START._replace(fields={**START.fields, "max_seconds": 36.0}))
    sink(Event(1.0, "step", 5, {**STEP, "of": None, "epochs": 0.5}))
    sink(Event(2.0, "epoch", 15, {**EPOCH, "epoch": 2, "epochs": 1.5}))
    text = shown(sink)
    sink._live.stop()
    assert re.search(r"epoch 2 +━.* 5 of 10 steps", text), text
    assert re.search(r"job +step 15 .* 14%", text), "5 s of 36"
    assert " 1.50      5.0 " in CODES.sub("", out.getvalue())
    lines = io.StringIO()
    TextWriter(lines)(Event(1.0, "step", 5, {**STEP, "of": None}))
    TextWriter(lines)(Event(1.0, "step", 5, {**STEP, "of": 2.25}))
    assert [line.partition(":")[0] for line in lines.getvalue().splitlines()] == [
        "  step 5, epoch 1.50",
        "  step 5, epoch 1.50 of 2.25",
    ]


class Writes(io.RawIOBase):
    """Keeps the bytes of each write to a file."""

    def __init__(self) -> None:
        self.found: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.found.append(bytes(data))
        return len(data)


def test_lines_of_a_script_are_written_whole_with_python_u() -> None:
    """torchrun starts scripts with python -u. print() then wrote its text and its newline
    separately, and a line of the job came between them."""
    raw = Writes()
    out = io.TextIOWrapper(raw, write_through=True)  # type: ignore[type-var]
    print("before", 1, file=out)
    before = len(raw.found)
    sink = terminal_sink(out, LogConfig(display="lines"))
    print("validation accuracy", 0.97, file=out)
    print("bar", end="\r", file=out)
    sink.close(1.0)
    assert before > 1 and raw.found[before:] == [b"validation accuracy 0.97\n", b"bar\r"]
