"""A signal is a flag, also while the main thread is inside MPI; a second one kills; children and earlier handlers are not affected."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from ranks import ROOT, Job, needs_mpirun, python

from hvdtrain.errors import REQUEUE
from hvdtrain.training.health.signals import ECHO_S, HANDLED, Signals

HOST = socket.gethostname()


def test_the_first_signal_is_received_and_the_former_handlers_come_back() -> None:
    former = [signal.getsignal(number) for number in HANDLED]
    with Signals(0) as signals:
        assert signals.received == ""
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.received == "SIGUSR1"  # by the handler, which runs at once here
        os.kill(os.getpid(), signal.SIGINT)  # an echo: neither a KeyboardInterrupt nor the end
        signals.poll()
        assert signals.received == "SIGUSR1"
        assert [signal.getsignal(number) for number in HANDLED] != former
    assert [signal.getsignal(number) for number in HANDLED] == former
    assert signal.set_wakeup_fd(-1) == -1


def test_poll_receives_a_signal_before_its_handler_runs() -> None:
    """The kernel's part only, as while the main thread is inside C code: the number is in the socket, the handler has not run."""
    with Signals(0) as signals:
        for number in HANDLED:
            signal.signal(number, lambda number, frame: None)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.received == ""
        signals.poll()
        assert signals.received == "SIGUSR2"


def test_a_call_of_a_c_library_goes_on_after_a_signal() -> None:
    """Most take EINTR for a failure. One byte comes 0.2 s after the signal."""
    libc, (reader, writer) = ctypes.CDLL(None), os.pipe()
    with Signals(0) as signals:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        threading.Timer(0.3, os.write, (writer, b"x")).start()
        assert libc.read(reader, ctypes.create_string_buffer(1), 1) == 1
        assert signals.received == "SIGUSR2"
    os.close(reader)
    os.close(writer)


def test_poll_waits_and_is_woken() -> None:
    with Signals(0) as signals:
        start = time.monotonic()
        signals.poll(0.2)
        assert 0.19 < time.monotonic() - start < 2
        threading.Timer(0.1, signals.wake).start()
        signals.poll(30)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        signals.poll(30)
        assert time.monotonic() - start < 10
        assert signals.received == "SIGTERM"


def test_other_handlers_of_this_process_are_not_ours() -> None:
    """SIGALRM, as pytest-timeout uses it, goes through the same socket."""
    rung: list[int] = []
    former = signal.signal(signal.SIGALRM, lambda number, frame: rung.append(number))
    try:
        with Signals(0) as signals:
            os.kill(os.getpid(), signal.SIGALRM)
            signals.poll()
            assert (rung, signals.received) == ([signal.SIGALRM], "")
    finally:
        signal.signal(signal.SIGALRM, former)


def test_in_another_thread_nothing_is_installed() -> None:
    seen: list[object] = []

    def other() -> None:
        with Signals(0) as signals:
            seen.append(signal.getsignal(signal.SIGINT))
            signals.wake()
            signals.poll(30)

    former = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [former]


def test_what_the_parent_ignores_stays_ignored() -> None:
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals(0) as signals:
            os.kill(os.getpid(), signal.SIGINT)
            signals.poll()
            assert signals.received == ""
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)


@pytest.mark.filterwarnings("ignore:.*fork")  # of a process that other tests have given threads: this child only sleeps
def test_a_forked_child_ends_by_sigterm_and_its_parent_receives_nothing() -> None:
    """As a pool of readers, which its parent ends by SIGTERM."""
    with Signals(0) as signals:
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        signals.poll()
        assert (os.WTERMSIG(status), signals.received) == (signal.SIGTERM, "")


@pytest.mark.parametrize(("engine", "how"), [("single", "loop"), pytest.param("mpi", "alone", marks=needs_mpirun)])
def test_a_second_signal_kills_at_once(engine: str, how: str) -> None:
    """In an endless loop, and in a collective that the other rank never joins. A repetition within a second is the same signal."""
    size = 2 if engine == "mpi" else 0
    hangs = ["0:sleep", "1:alone"] if size else ["0:loop"]
    with Job(size, ["tests/support/watchdog_on_ranks.py", engine, "0", "0", *hangs]) as job:
        wait_for(lambda: job.output().count("trained") == (size or 1), 30)
        pid = job.pids()[1] if size else max(job.processes())
        for pause_s in (0.3, ECHO_S):
            os.kill(pid, signal.SIGUSR2)
            time.sleep(pause_s)
            assert pid in job.processes()
        os.kill(pid, signal.SIGTERM)
        start = time.monotonic()
        wait_for(lambda: not job.processes(), 10)
        result = job.wait()
    print(f"{engine}, in {how}: all gone {time.monotonic() - start:.1f} s after the second signal, exit code {result.returncode}")
    assert result.returncode == 128 + signal.SIGTERM, result
    assert f"hvdtrain: rank {1 if size else 0} on {HOST}: second SIGTERM: killed without a checkpoint\n" in result.stderr
    assert time.monotonic() - start < 8


def test_one_signal_is_left_to_the_job() -> None:
    with Job(0, ["tests/support/watchdog_on_ranks.py", "single", "0", "0"]) as job:
        wait_for(lambda: "trained" in job.output(), 30)
        (pid,) = job.processes()
        for _ in range(2):
            os.kill(pid, signal.SIGTERM)
        result = job.wait()
    assert (result.returncode, result.stderr) == (0, ""), result
    assert "rank 0 received SIGTERM" in result.stdout


EARLY = """
import os, signal, sys
import hvdtrain.__main__ as program
def run_command(arguments, run_command=program.run_command):
    os.kill(os.getpid(), signal.SIGUSR2)  # before anything else is imported
    return run_command(arguments)
program.run_command = run_command
sys.exit(program.main())
"""


def test_a_signal_before_the_job_can_listen_is_handed_over(tmp_path: Path) -> None:
    """It ends a start that takes long; a short one goes on to the first sync point, which saves."""
    result = python(["-c", EARLY, "framework=numpy", "model.name=linear", f"run={tmp_path / 'run'}"])
    assert result.returncode == REQUEUE, result
    of_start = f"hvdtrain: rank 0 on {HOST}: SIGUSR2 during the start .*: nothing to save; the same command starts again\n"
    assert re.fullmatch(of_start, result.stderr) or ("SIGUSR2" in result.stdout and list(tmp_path.glob("run/checkpoints/step-*"))), result


def test_a_command_that_saves_nothing_is_killed_as_ever() -> None:
    assert python(["-c", EARLY, "list"]).returncode == -signal.SIGUSR2


def test_what_is_imported_before_the_first_signal_can_be_remembered_is_light() -> None:
    """The time before it is Python's own start: 5 ms of difflib in hvdtrain.errors were a third of the rest."""
    code = "import sys, hvdtrain.__main__; print(*sys.modules)"
    modules = python(["-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]).stdout.split()
    assert "hvdtrain.core.early_signals" in modules
    assert not {"difflib", "socket", "traceback", "subprocess", "pathlib", "numpy", "pydantic", "argparse"} & set(modules), modules


LATE = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.SIGUSR2)
from hvdtrain.__main__ import main
sys.exit(main())
"""


def test_a_signal_after_the_end_kills_nothing(tmp_path: Path) -> None:
    """SLURM's signal before the time limit may find a job that is just over: its code stays 0."""
    words = ["framework=numpy", "model.name=linear", "max_steps=2", f"run={tmp_path / 'run'}"]
    result = python(["-c", LATE, *words])
    assert result.returncode == 0 and "run folder: " in result.stdout, result


def wait_for(condition: object, limit_s: float) -> None:
    end = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
