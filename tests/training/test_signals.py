"""A signal is a flag, also while the main thread is inside MPI; a second one kills; children and
earlier handlers are not affected."""

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
from pool import alone
from ranks import ROOT, Job, needs_mpirun, python
from waiting import is_stopped, wait_until

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
    """The kernel's part only, as while the main thread is inside C code: the number is in the
    socket, the handler has not run."""
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

    def signal_then_byte() -> None:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.2)
        os.write(writer, b"x")

    with Signals(0) as signals:
        thread = threading.Timer(0.1, signal_then_byte)
        thread.start()
        assert libc.read(reader, ctypes.create_string_buffer(1), 1) == 1
        assert signals.received == "SIGUSR2"
        thread.join()
    os.close(reader)
    os.close(writer)


def test_poll_waits_and_is_woken() -> None:
    with Signals(0) as signals:
        start = time.monotonic()
        signals.poll(0.2)
        assert time.monotonic() - start > 0.19
        threading.Timer(0.1, signals.wake).start()
        signals.poll(1e6)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        signals.poll(1e6)
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
            signals.poll(1e6)

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


@pytest.mark.filterwarnings(
    "ignore:.*fork"
)  # of a process that other tests have given threads: this child only sleeps
def test_a_forked_child_ends_by_sigterm_and_its_parent_receives_nothing() -> None:
    """As a pool of readers, which its parent ends by SIGTERM."""
    reader, writer = os.pipe()
    with Signals(0) as signals:
        child = os.fork()
        if not child:
            os.write(writer, b"x")
            time.sleep(1e6)
            os._exit(0)
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        signals.poll()
        assert (os.WTERMSIG(status), signals.received) == (signal.SIGTERM, "")
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("engine", "how"), [("single", "loop"), pytest.param("mpi", "alone", marks=needs_mpirun)]
)
def test_a_second_signal_kills_at_once(engine: str, how: str) -> None:
    """In an endless loop, and in a collective that the other rank never joins. A repetition within
    a second is the same signal, so the second one comes again and again.
    """
    size = 2 if engine == "mpi" else 0
    hangs = ["0:sleep", "1:alone"] if size else ["0:loop"]
    with Job(size, alone("watchdog_on_ranks:main", engine, 0, 0, *hangs)) as job:
        wait_until(lambda: job.output().count("trained") == (size or 1), "it trains")
        pid = job.pids()[1] if size else max(job.processes())
        os.kill(pid, signal.SIGUSR2)
        start = time.monotonic()

        def is_gone() -> bool:
            if time.monotonic() > start + ECHO_S and pid in job.processes():
                os.kill(pid, signal.SIGTERM)
            return not job.processes()

        wait_until(is_gone, "the second signal kills")
        result = job.wait()
    assert result.returncode == 128 + signal.SIGTERM, result
    assert (
        f"hvdtrain: rank {1 if size else 0} on {HOST}: second SIGTERM: killed without a "
        "checkpoint\n" in result.stderr
    )


@pytest.mark.clock
def test_a_repetition_within_a_second_is_the_same_signal() -> None:
    """The second one within 0.3 s of the first kills nobody; the third, a second later, does."""
    with Job(0, alone("watchdog_on_ranks:main", "single", 0, 0, "0:loop")) as job:
        wait_until(lambda: "trained" in job.output(), "it trains")
        (pid,) = job.processes()
        for pause_s in (0.3, ECHO_S):
            os.kill(pid, signal.SIGUSR2)
            time.sleep(pause_s)
            assert pid in job.processes()
        os.kill(pid, signal.SIGTERM)
        assert job.wait().returncode == 128 + signal.SIGTERM


def test_one_signal_is_left_to_the_job() -> None:
    """The same one comes twice."""
    with Job(0, alone("watchdog_on_ranks:main", "single", 0, 0, "0:suspend")) as job:
        wait_until(lambda: "trained" in job.output(), "it trains")
        (pid,) = job.processes()
        for _ in range(2):
            wait_until(lambda: is_stopped(pid), "it stops itself")
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGCONT)
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
    """It ends a long startup; a short one continues to the first sync point, which saves."""
    result = python(
        ["-c", EARLY, "framework=numpy", "model.name=linear", f"run={tmp_path / 'run'}"],
        is_warm=False,
    )
    assert result.returncode == REQUEUE, result
    of_start = (
        f"hvdtrain: rank 0 on {HOST}: SIGUSR2 during the start .*: nothing to save; the same "
        "command starts again\n"
    )
    assert re.fullmatch(of_start, result.stderr) or (
        "SIGUSR2" in result.stdout and list(tmp_path.glob("run/checkpoints/step-*"))
    ), result


def test_a_command_that_saves_nothing_is_killed_as_ever() -> None:
    assert python(["-c", EARLY, "list"], is_warm=False).returncode == -signal.SIGUSR2


def test_what_is_imported_before_the_first_signal_can_be_remembered_is_light() -> None:
    """The time before it is Python's own start: 5 ms of difflib in hvdtrain.errors were a third of
    the rest."""
    code = "import sys, hvdtrain.__main__; print(*sys.modules)"
    modules = python(
        ["-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {code}"]
    ).stdout.split()
    assert "hvdtrain.core.early_signals" in modules
    assert not {
        "difflib",
        "socket",
        "traceback",
        "subprocess",
        "pathlib",
        "numpy",
        "pydantic",
        "argparse",
    } & set(modules), modules


LATE = """
import atexit, os, signal, sys
atexit.register(os.kill, os.getpid(), signal.SIGUSR2)
from hvdtrain.__main__ import main
sys.exit(main())
"""


def test_a_signal_after_the_end_kills_nothing(tmp_path: Path) -> None:
    """SLURM's signal before the time limit may find a job that is just over: its code stays 0."""
    words = ["framework=numpy", "model.name=linear", "max_steps=2", f"run={tmp_path / 'run'}"]
    result = python(["-c", LATE, *words], is_warm=False)
    assert result.returncode == 0 and "run folder: " in result.stdout, result
