"""A rank that makes no progress ends the job within seconds of its limit, and the report names it;
a suspended job continues."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
from pool import alone
from ranks import (
    FULL,
    HANG_S,
    ONE_ENGINE,
    Job,
    Result,
    environment,
    mpirun,
    needs_horovod,
    needs_mpirun,
    python,
)
from waiting import is_stopped, wait_until

from hvdtrain.comm.mesh import PIECES, ranks_summary
from hvdtrain.core.metrics import host_value
from hvdtrain.errors import REQUEUE, STALLED
from hvdtrain.training.health.stall_report import (
    SILENCE,
    StallReport,
    frames_of,
    is_waiting,
    render,
    render_alone,
)
from hvdtrain.training.health.watchdog import IdleTime

STALL_S = 1.0
HOST = socket.gethostname()
SLEEP_LINE = "in sleep: time.sleep(1000)  # the line that a report shows"


def words(engine: str, *hangs: str, stall_s: float = STALL_S, start_s: float = 600) -> list[str]:
    return alone("watchdog_on_ranks:main", engine, stall_s, start_s, *hangs)


def hung_s(result: Result) -> float:
    """Seconds since the first rank said that it goes to hang."""
    return time.time() - min(float(line.split()[-1]) for line in result.stdout.splitlines())


def expect_end(result: Result, what: str) -> None:
    seconds = hung_s(result)
    print(
        f"{what}: ended {seconds:.1f} s after the hang (limit {STALL_S:g} s), exit code "
        f"{result.returncode}"
    )
    assert result.returncode == STALLED, result
    assert seconds > STALL_S
    assert result.stderr.count("hvdtrain: ") == 1, result.stderr  # one report
    assert "Traceback" not in result.stderr


HANGS = [
    *(pytest.param(*e.values, "sleep", marks=e.marks) for e in ONE_ENGINE["horovod"]),
    ("mpi", "loop"),
]


@pytest.mark.parametrize(("engine", "how"), HANGS)
@needs_mpirun
def test_a_rank_that_hangs_is_named(engine: str, how: str) -> None:
    result = mpirun(2, words(engine, f"1:{how}"))
    expect_end(result, f"{engine}, rank 1 in {how}")
    lines = result.stderr[result.stderr.index("hvdtrain: ") :].splitlines()
    assert lines[:2] == [
        "hvdtrain: no progress for 1 s (guard.stall_s); the job ends with exit code 81",
        "behind:",
    ]
    assert re.fullmatch(
        rf"  rank 1 on {HOST}, pid \d+: reading samples, epoch 3, step 21, for \d+ s, since "
        r"\d+-\d+-\d+ \d+:\d+:\d+",
        lines[2],
    )
    last = next(
        place for place, line in enumerate(lines) if not line.startswith("  ") and place > 2
    )
    calls = {
        "sleep": [SLEEP_LINE],
        "loop": ["in loop: while True:", "in loop: pass  # a loop without an end"],
    }
    assert lines[last - 1].endswith(tuple(calls[how])), lines
    assert lines[last] == "waiting: rank 0 at step 21, epoch 3: step"


@pytest.mark.clock
@needs_mpirun
@pytest.mark.parametrize(("how", "within_s"), [*[("sleep", 20)] * FULL, ("stop", 50)])
def test_a_hang_ends_the_job_within_seconds_of_the_limit(how: str, within_s: float) -> None:
    """Where nothing else runs: 1.7 s after a rank sleeps, and 4.7 s after it was stopped, of which
    3 are for its answer."""
    result = mpirun(2, words("mpi", f"1:{how}"))
    expect_end(result, f"mpi, rank 1 in {how}")
    assert hung_s(result) < within_s


@needs_mpirun
def test_rank_0_that_hangs_is_named() -> None:
    result = mpirun(2, words("mpi", "0:sleep"))
    expect_end(result, "mpi, rank 0 asleep")
    assert f"  rank 0 on {HOST}, pid" in result.stderr
    assert SLEEP_LINE in result.stderr
    assert "waiting: rank 1 at step 21, epoch 3: step" in result.stderr


@pytest.mark.ranks4
@needs_mpirun
def test_one_of_four_is_behind() -> None:
    result = mpirun(4, words("mpi", "2:sleep"))
    expect_end(result, "mpi, rank 2 of 4 asleep")
    assert f"behind:\n  rank 2 on {HOST}, pid" in result.stderr
    assert "waiting: ranks 0-1, 3 at step 21, epoch 3: step" in result.stderr


@pytest.mark.parametrize("engine", ONE_ENGINE["mpi"])
def test_a_stopped_rank_gives_no_answer(engine: str) -> None:
    with Job(2, words(engine, "1:stop")) as job:
        result = job.wait()
        expect_end(result, f"{engine}, rank 1 stopped")
        wait_until(lambda: not job.processes(), "the stopped rank is gone, too")
    assert (
        f"no answer ({SILENCE}):\n  rank 1 on {HOST}\nwaiting: rank 0 at step 21, epoch 3: step\n"
        in result.stderr
    )
    assert "in alone: communicator.allreduce" in result.stderr  # what it waits in


@pytest.mark.slow
@needs_mpirun
def test_a_rank_whose_c_code_keeps_the_interpreter_is_named_by_the_others() -> None:
    result = mpirun(2, words("mpi", "1:hold"))
    expect_end(result, "mpi, rank 1 holds the interpreter lock")
    assert (
        f"no answer ({SILENCE}):\n  rank 1 on {HOST}\nwaiting: rank 0 at step 21, epoch 3: step\n"
        in result.stderr
    )


@needs_mpirun
@pytest.mark.slow
def test_without_rank_0_the_others_end_the_job() -> None:
    with Job(2, words("mpi", "0:stop")) as job:
        result = job.wait()
        expect_end(result, "mpi, rank 0 stopped")
        wait_until(lambda: not job.processes(), "the stopped rank is gone, too")
    assert (
        f"hvdtrain: rank 1 on {HOST}: no progress for 1 s (guard.stall_s), and rank 0 on {HOST} "
        "does not answer; exit code 81" in result.stderr
    )


@pytest.mark.clock
@needs_mpirun
@needs_horovod
def test_a_rank_that_never_connects_is_named() -> None:
    """Rank 0 waits inside hvd.init, and leaves the word, for a second, to the rank that is
    behind."""
    result = mpirun(2, words("horovod", "1:never", start_s=STALL_S))
    expect_end(result, "horovod, rank 1 never connects")
    assert (
        f"hvdtrain: rank 1 on {HOST}: no progress for 1 s (guard.start_s); exit code 81\n  rank 1"
        in result.stderr
    )
    assert ": reading the data, epoch 0, step 0, for" in result.stderr
    assert "time.sleep(1000)  # before it connects" in result.stderr


@pytest.mark.clock
@pytest.mark.parametrize("how", ["never", "start"])
@needs_mpirun
def test_a_signal_during_the_start_ends_all_ranks_at_once(how: str) -> None:
    """Rank 1 waits two seconds, in which rank 0 speaks for both and ends the job."""
    with Job(2, words("mpi", f"0:{how}", f"1:{how}")) as job:
        wait_until(lambda: job.output().count("\n") == 2, "both ranks start")
        pids = job.pids()
        sent_s = time.monotonic()
        for rank in (0, 1):
            os.kill(pids[rank], signal.SIGUSR2)
        result = job.wait()
        seconds = time.monotonic() - sent_s
    print(f"signal during the start: ended after {seconds:.1f} s")
    phase = {"never": "reading the data", "start": "attaching the watchdog"}[how]
    line = (
        f"hvdtrain: rank 0 on {HOST}: SIGUSR2 during the start ({phase}): nothing to save; the "
        "same command starts again\n"
    )
    assert (result.returncode, seconds < 10) == (REQUEUE, True), result
    assert line in result.stderr
    assert "rank 1 on" not in result.stderr


def test_a_suspended_job_is_no_stall() -> None:
    with Job(0, words("single", "0:suspend")) as job:
        wait_until(lambda: "trained" in job.output(), "it trains")
        (pid,) = job.processes()
        for _ in range(2):
            wait_until(lambda: is_stopped(pid), "it stops itself")
            time.sleep(1.3 * STALL_S)
            os.kill(pid, signal.SIGCONT)
        result = job.wait()
    assert (result.returncode, result.stderr) == (0, ""), result
    assert "rank 0 received nothing" in result.stdout


FAKE = """
import threading, time
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.sections.guard import GuardConfig
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog
goes_on = threading.Event()
class Fake(SingleProcessCommunicator):
    asked = threading.Semaphore(0)
    def side_channel_gather(self, thing, wait_s):
        self.asked.release()
        {in_gather}
        return {found}
communicator, heartbeat = Fake(), Heartbeat(limit="stall_s", training=True)
with Signals(0) as signals, Watchdog(heartbeat, signals, GuardConfig().replace(stall_s=0.3), 0) as watchdog:
    watchdog.attach(communicator)
    for turn in range(20):  # longer than stall_s
        heartbeat.beat("step", 0, turn)
        time.sleep(0.02)
    print("asked", communicator.asked.acquire(blocking=False))
    {hang}
    heartbeat.beat("step", 0, 21)
    goes_on.set()
    time.sleep(0.02)
print("asked again", communicator.asked.acquire(blocking=False))
"""  # noqa: E501


def fake(in_gather: str, hang: str, found: str) -> Result:
    return python(["-c", FAKE.format(in_gather=in_gather, hang=hang, found=found)])


def test_a_stall_that_passes_before_the_report_is_out_is_forgotten() -> None:
    result = fake("goes_on.wait()", "communicator.asked.acquire()", "[thing]")
    assert (result.returncode, result.stdout, result.stderr) == (
        0,
        "asked False\nasked again False\n",
        "",
    )


@pytest.mark.parametrize(
    ("found", "first"), [("[thing]", "hvdtrain: "), ("None", f"hvdtrain: rank 0 on {HOST}: ")]
)
def test_a_single_process_or_a_rank_without_a_side_channel_reports_itself(
    found: str, first: str
) -> None:
    result = fake("pass", "time.sleep(1e6)", found)
    assert result.returncode == STALLED
    assert result.stderr.startswith(f"{first}no progress for 0.3 s (guard.stall_s); ")
    assert f"  rank 0 on {HOST}, pid" in result.stderr


def test_a_gather_that_hangs_or_a_full_pipe_does_not_keep_the_job() -> None:
    """The pipe: the main thread hangs in a print, with the lock of stdout, which a clean end would
    wait for."""
    program = FAKE.format(
        in_gather="pass", hang="print('x' * 1000000, flush=True)", found="[thing]"
    )
    reader, writer = os.pipe()
    piped = subprocess.Popen(
        [sys.executable, "-c", program], stdout=writer, stderr=writer, env=environment()
    )
    result = fake("time.sleep(1e6)", "time.sleep(1e6)", "[thing]")
    code = piped.wait(HANG_S)
    os.close(reader)
    os.close(writer)
    assert (code, result.returncode) == (STALLED, STALLED)
    assert result.stderr.startswith(f"hvdtrain: rank 0 on {HOST}: no progress for 0.3 s")


def test_a_report_that_fails_does_not_keep_the_job() -> None:
    result = fake("pass", "heartbeat.under_way = lambda: 1 / 0; time.sleep(1e6)", "[thing]")
    assert result.returncode == STALLED
    assert result.stderr.startswith(
        f"hvdtrain: rank 0 on {HOST}: no progress for 0.3 s (guard.stall_s); the job ends with "
        "exit code 81"
    )
    assert "ZeroDivisionError" in result.stderr


def test_idle_seconds_of_a_process_that_slept() -> None:
    # asleep between the third look and the fourth
    idle = IdleTime(most_s=1.0)
    clock = [10.0, 10.5, 11.0, 999.0, 999.5]
    seen = []
    for now_s in clock:
        idle.update(7, now_s)
        seen.append(idle.seconds)
    assert seen == [0, 0.5, 1.0, 2.0, 2.5]
    idle.update(8, 1000.0)
    assert idle.seconds == 0


def report(
    rank: int, waiting: bool, phase: str = "step", step: int = 121, calls: int = 1
) -> StallReport:
    stack = tuple(f"job.py:{call} in f{call}: g()" for call in range(calls))
    return StallReport(
        rank,
        f"node{rank // 8}",
        100 + rank,
        phase,
        3,
        step,
        301.4,
        "2026-11-21 10:31:07",
        waiting,
        stack,
    )


TODO = (
    "to do: look at the ranks named first; if they were only slow, raise guard.stall_s, now 300 "
    "(null: no limit)"
)
FIRST = "hvdtrain: no progress for 300 s (guard.stall_s); the job ends with exit code 81"


def hosts(size: int) -> list[str]:
    return [f"node{rank // 8}" for rank in range(size)]


def test_report_of_one_behind_one_silent_and_six_waiting() -> None:
    reports = [report(rank, True) for rank in range(8)]
    reports[7] = report(7, True, "evaluation", 120)
    received = [*reports[:1], report(1, False, "reading samples", 120, 2), None, *reports[3:]]
    assert render(received, hosts(8), 300.0, "guard.stall_s").splitlines() == [
        FIRST,
        "behind:",
        "  rank 1 on node0, pid 101: reading samples, epoch 3, step 120, for 301 s, since "
        "2026-11-21 10:31:07",
        "    job.py:0 in f0: g()",
        "    job.py:1 in f1: g()",
        "no answer (still busy, stopped, swapping, its host is down, or a C extension holds the "
        "interpreter):",
        "  rank 2 on node0",
        "waiting: rank 7 at step 120, epoch 3: evaluation",
        "waiting: ranks 0, 3-6 at step 121, epoch 3: step",
        TODO,
    ]


def test_report_of_busy_ranks_begins_with_the_earliest_step() -> None:
    """Where collectives run on the device, hosts go on for several steps: the rank that all wait
    for is shown, with its stack, whatever its number."""
    received = [report(rank, False, step=123) for rank in range(8)]
    received[4] = report(4, False, "synchronizing", 130)
    received[6] = report(6, False, "reading samples", 121)
    received[7] = report(7, False, step=121)
    lines = render(received, hosts(8), 300.0, "guard.stall_s").splitlines()
    assert [line[:9] for line in lines[1:8]] == [
        "behind:",
        "  rank 6 ",
        "    job.p",
        "  rank 7 ",
        "    job.p",
        "  rank 0 ",
        "    job.p",
    ]
    assert lines[8:] == [
        "  and ranks 1-3, 5 at step 123, epoch 3: step",
        "  and rank 4 at step 130, epoch 3: synchronizing",
        TODO,
    ]


class OnDevice:
    """A number that the device has once it is released."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.there = threading.Event()

    def tolist(self) -> float:
        self.asked.set()
        assert self.there.wait(HANG_S)
        return 1.0


def test_a_rank_whose_host_waits_for_its_device_waits_for_other_ranks() -> None:
    """With NCCL, whose collectives run on the device: in host_value(), not in a call of
    hvdtrain.comm."""
    number = OnDevice()
    thread = threading.Thread(target=host_value, args=(number,))
    thread.start()
    assert number.asked.wait(HANG_S) and thread.ident is not None
    frames = frames_of(thread.ident)
    number.there.set()
    thread.join()
    assert is_waiting(frames) and not is_waiting(frames[-2:])


def test_report_of_a_silent_host() -> None:
    received = [None if 8 <= rank < 16 else report(rank, True) for rank in range(24)]
    assert render(received, hosts(24), 300.0, "guard.stall_s").splitlines() == [
        FIRST,
        f"no answer ({SILENCE}):",
        "  ranks 8-15 on node1",
        "waiting: ranks 0-7, 16-23 at step 121, epoch 3: step",
        "    job.py:0 in f0: g()",
        TODO,
    ]


def test_report_where_every_rank_waits() -> None:
    received = [report(0, True), report(1, True, step=120), report(2, True)]
    lines = render(received, hosts(3), 300.0, "guard.stall_s").splitlines()
    assert lines[1] == "behind (every rank waits for the others, these since the earliest step):"
    assert lines[2].startswith("  rank 1 on node0, pid 101: step, epoch 3, step 120, for")
    assert lines[4:] == ["waiting: ranks 0, 2 at step 121, epoch 3: step", TODO]


def test_report_of_ranks_in_different_collectives() -> None:
    received = [
        report(0, True),
        report(1, True),
        report(2, True, calls=2),
        report(3, True, calls=2),
    ]
    lines = render(received, hosts(4), 300.0, "guard.stall_s").splitlines()
    assert lines[1] == "behind: no rank: all wait for each other at the same step"
    assert [line[:8] for line in lines[2:7]] == [
        "  rank 0",
        "    job.",
        "  rank 2",
        "    job.",
        "    job.",
    ]
    assert lines[-2] == "  and ranks 1, 3 at step 121, epoch 3: step"


def in_pipeline(rank: int, doing: str, waits_for: int | None = None) -> StallReport:
    return replace(
        report(rank, True),
        place=f"stage {rank // 2}, data {rank % 2}",
        doing=doing,
        waits_for=waits_for,
    )


def test_report_of_a_pipeline_names_the_rank_that_others_wait_for() -> None:
    first = "backward pass of micro-batch 1 in stage 0, waits for stage 1"
    last = "backward pass of micro-batch 1 in stage 1"
    received = [
        in_pipeline(0, first, 2),
        in_pipeline(1, first, 3),
        in_pipeline(2, last),
        in_pipeline(3, f"{last}, waits for stage 0", 1),
    ]
    lines = render(received, hosts(4), 300.0, "guard.stall_s").splitlines()
    assert lines[1] == "behind (others wait for their messages, and they in another collective):"
    assert lines[2] == (
        "  rank 2 on node0 (stage 1, data 0), pid 102: step, epoch 3, step 121, for 301 s, since "
        "2026-11-21 10:31:07, in the " + last
    )
    assert lines[4:6] == [
        f"waiting: ranks 0-1 at step 121, epoch 3: step, {first} (ranks 2-3)",
        f"waiting: rank 3 at step 121, epoch 3: step, {last}, waits for stage 0 (rank 1)",
    ]
    places = [f"stage {rank // 2}, data {rank % 2}" for rank in range(4)]
    silent = render(
        [*received[:2], None, None], hosts(4), 300.0, "guard.stall_s", places
    ).splitlines()
    assert silent[2:4] == [
        "  rank 2 on node0 (stage 1, data 0)",
        "  rank 3 on node0 (stage 1, data 1)",
    ]
    busy = replace(received[2], waiting=False)
    assert render(
        [*received[:2], busy, received[3]], hosts(4), 300.0, "guard.stall_s"
    ).splitlines()[1:3] == ["behind:", lines[2]]


def test_report_of_many_ranks_fits_one_screen() -> None:
    received = [
        None if rank % 5 == 0 else report(rank, rank % 3 == 0, f"phase {rank % 7}", rank, 30)
        for rank in range(1024)
    ]
    lines = render(received, hosts(1024), 300.0, "guard.stall_s").splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) < 250
    assert lines[3].endswith("job.py:22 in f22: g()")
    assert lines[10].endswith("job.py:29 in f29: g()")


def test_report_of_one_rank_alone() -> None:
    text = render_alone(report(9, False, "building"), 600.0, "guard.start_s")
    assert text.splitlines() == [
        "hvdtrain: rank 9 on node1: no progress for 600 s (guard.start_s); exit code 81",
        "  rank 9 on node1, pid 109: building, epoch 3, step 121, for 301 s, since 2026-11-21 "
        "10:31:07",
        "    job.py:0 in f0: g()",
        "to do: look at the ranks named first; if they were only slow, raise guard.start_s, now "
        "600 (null: no limit)",
    ]


def test_names_of_ranks() -> None:
    assert [ranks_summary(ranks) for ranks in ([3], [0, 1], [0, 2, 3, 4, 9])] == [
        "rank 3",
        "ranks 0-1",
        "ranks 0, 2-4, 9",
    ]
    assert (
        ranks_summary(range(0, 1024, 2))
        == f"ranks {', '.join(str(2 * piece) for piece in range(PIECES))}, ... (512 ranks)"
    )
