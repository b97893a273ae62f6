"""A clock that is set a day forward or back in mid-training changes nothing: neither a stall report
nor an early or late end."""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import time
from itertools import pairwise
from pathlib import Path

import pytest
from faults import (
    EPOCH,
    Command,
    Row,
    Tree,
    ends_as_straight,
    events,
    gone,
    launcher,
    next_end,
    outcome,
    reached,
    record,
    said_by_ranks,
    straight,
    wait_for,
)
from ranks import FULL, needs_horovod, needs_mpirun

from hvdtrain.errors import REQUEUE

pytestmark = [pytest.mark.faults, needs_mpirun]
DAY_S = 86400
LIMIT_S = 12.0

# The time of day, plus the seconds in the file $CLOCK_JUMP once that file exists.
SHIM = """
#include <fcntl.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static time_t jump_s(void) {
    static time_t seconds;
    char text[32] = {0};
    int file = seconds ? -1 : open(getenv("CLOCK_JUMP"), O_RDONLY);
    if (file >= 0) {
        if (read(file, text, 31) > 0) seconds = atol(text);
        close(file);
    }
    return seconds;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += jump_s();
    return failed;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    int failed = syscall(SYS_gettimeofday, now, zone);
    if (!failed) now->tv_sec += jump_s();
    return failed;
}
time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}
"""  # noqa: E501


@pytest.fixture
def clock(tmp_path: Path) -> dict[str, str]:
    """The environment of a job whose clock jumps when the file jump is there."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if not compiler:
        pytest.skip("no C compiler here, which makes the clock that jumps")
    (tmp_path / "clock.c").write_text(SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", tmp_path / "clock.so", tmp_path / "clock.c"],
        check=True,
    )
    return {"LD_PRELOAD": str(tmp_path / "clock.so"), "CLOCK_JUMP": str(tmp_path / "jump")}


def jumped_s(emitted: list[Tree]) -> float:
    """The largest step of the clock from one event to the next."""
    return max((b["time"] - a["time"] for a, b in pairwise(emitted)), key=abs)


def after_jump(run: Path) -> float:
    """The step after which the clock had jumped; infinite before."""
    return next(
        (a["step"] for a, b in pairwise(events(run)) if abs(b["time"] - a["time"]) > DAY_S / 2),
        math.inf,
    )


@pytest.mark.parametrize(
    ("command", "jump_s"),
    [
        pytest.param(Command("mpi", 2, framework="numpy"), DAY_S, id="mpi-2-forward"),
        pytest.param(Command("mpi", 2, framework="numpy"), -DAY_S, id="mpi-2-back"),
        *[pytest.param(Command("horovod", 2), DAY_S, id="horovod-2-forward", marks=needs_horovod)]
        * FULL,
    ],
)
def test_a_clock_that_jumps_is_no_stall(
    tmp_path: Path, clock: dict[str, str], command: Command, jump_s: int
) -> None:
    """It trains on for more than an epoch after the jump, until it is stopped."""
    run = tmp_path / "run"
    limits = ("guard.stall_s=100", "guard.start_s=600", "guard.max_time=100m")
    with command._replace(words=limits).start(run, env=clock) as job:
        wait_for(job, lambda: reached(run) >= 50)
        Path(clock["CLOCK_JUMP"]).write_text(str(jump_s))
        wait_for(job, lambda: reached(run) > after_jump(run) + 2 * EPOCH)
        os.kill(launcher(job), signal.SIGUSR2)
        result = job.wait()
    assert (result.returncode, said_by_ranks(result)) == (REQUEUE, ""), result
    assert "stopped (SIGUSR2) at step" in result.stdout, result
    emitted = events(run)
    assert jumped_s(emitted) == pytest.approx(jump_s, abs=60)
    seconds = [e["seconds"] for e in emitted if e["kind"] == "epoch"]
    assert seconds == sorted(seconds) and 0 < seconds[-1] < result.seconds
    equal = ends_as_straight(command, run)
    record(
        Row(
            command.engine,
            2,
            f"the clock jumps by {jump_s // DAY_S:+d} day",
            [],
            0,
            equal,
            [result.returncode],
        )
    )
    assert equal


@pytest.mark.clock
def test_the_time_limit_holds_when_the_clock_is_set_back(
    tmp_path: Path, clock: dict[str, str]
) -> None:
    run = tmp_path / "run"
    plain = Command("mpi", 2)
    slow = plain._replace(words=("model.pass_s=0.05", f"--max-time={LIMIT_S:g}"))
    with slow.start(run, env=clock) as job:
        begun = time.monotonic()
        wait_for(job, lambda: reached(run) >= 10)
        Path(clock["CLOCK_JUMP"]).write_text(str(-DAY_S))
        result = job.wait()
        gone(job, time.monotonic())
        seconds = time.monotonic() - begun
    assert result.returncode == REQUEUE, result
    assert f"stopped (guard.max_time={LIMIT_S:g}) at step" in result.stdout
    assert jumped_s(events(run)) == pytest.approx(-DAY_S, abs=60)
    assert seconds > LIMIT_S / 2
    last = plain.up_to(next_end(run))
    last._replace(words=(*last.words, f"resume={run}", "model.pass_s=0.0")).finish(run)
    equal = outcome(run) == straight(last)
    record(
        Row(
            "mpi",
            2,
            f"--max-time {LIMIT_S:g}, and the clock jumps by -1 day",
            [seconds],
            0,
            equal,
            [result.returncode],
        )
    )
    assert equal
