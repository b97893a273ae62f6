"""Lengths of time as people and SLURM write them, and which end of a job comes first."""

from __future__ import annotations

import math
import os
import re
import time
from datetime import datetime
from pathlib import Path

import pytest

from hvdtrain.core.lengths import parse_duration
from hvdtrain.errors import UserError
from hvdtrain.training.health.monitor import Deadline

NOW_S = 1_800_000_000.0  # of the day
CLOCK_S = 5000.0  # of the monotonic clock, at the same moment
AT = datetime.fromtimestamp(NOW_S + 600)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("0.5", 0.5),
        ("45m", 2700.0),
        ("3.5h", 12600.0),
        ("2d", 172800.0),
        ("45:00", 2700.0),
        ("90:30", 5430.0),
        ("1:30:00", 5400.0),
        ("100:00:01", 360001.0),
        ("2-00:00:00", 172800.0),
        ("1-12", 129600.0),
        ("0-0:05", 300.0),
        ("1-23:59:59", 172799.0),
        (" 5m ", 300.0),
    ],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text, "guard.max_time") == seconds


BAD = [
    "",
    "-5",
    "nan",
    "inf",
    "1e3",
    "3,5h",
    "5 m",
    "5w",
    "h",
    "1:60",
    "1:2:3:4",
    "1:00:61",
    "1-24:00:00",
    "-1:00",
    "1:-1",
    "٣m",
    "5m\n5m",
    "x" * 9999,
]


@pytest.mark.parametrize("text", [*BAD, "9" * 5000], ids=lambda text: text[:12])
def test_a_duration_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_duration(text, "guard.max_time, job.yaml:3")
    shown = repr(text if len(text) <= 40 else text[:37] + "...")
    assert str(caught.value) == (
        f"{shown} is not a length of time\n  where: guard.max_time, job.yaml:3\n"
        "  fix: write 90 (seconds), 45m, 3.5h, 2d, 45:00 (minutes), 1:30:00 or 2-00:00:00"
    )


@pytest.mark.parametrize("text", ["0", "0.0h", "0:00", "0-00:00:00"])
def test_no_time_at_all(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"{text!r} leaves no time at all")):
        parse_duration(text, "guard.max_time")


class Clock:
    """A monotonic clock that stands still."""

    def __init__(self) -> None:
        self.now_s = CLOCK_S

    def __call__(self) -> float:
        return self.now_s


def deadline(max_time: str | None, clock: Clock, **environ: str) -> Deadline:
    """Of a process that is 100 s old."""
    return Deadline(max_time, environ, CLOCK_S - 100, NOW_S, clock)


def stops_after(limit: Deadline, clock: Clock, longest_s: float = 0, save_s: float = 0) -> float:
    """The first whole second from now at which it is near."""
    for second in range(100_000):
        clock.now_s = CLOCK_S + second
        if limit.near(longest_s, save_s):
            return second
    raise AssertionError("never near")


def test_max_time_counts_from_the_start_of_the_process() -> None:
    clock = Clock()
    limit = deadline("1h", clock)
    assert limit.reason == "guard.max_time=1h"
    assert stops_after(limit, clock) == 3600 - 100 - 2 + 1  # the last 2 s are its margin
    # 1.5 intervals between sync points, 2 checkpoints
    assert stops_after(limit, clock, longest_s=20, save_s=7) == 3498 - 30 - 14 + 1


def test_what_is_left_is_until_the_end_itself() -> None:
    clock = Clock()
    limit = deadline("1h", clock)
    assert (limit.left_s(), deadline(None, clock).left_s()) == (3500.0, math.inf)
    clock.now_s += 3400
    assert limit.left_s() == 100.0
    clock.now_s += 3400
    assert limit.left_s() == 0.0


def test_the_end_of_a_slurm_job() -> None:
    clock = Clock()
    limit = deadline(None, clock, SLURM_JOB_ID="123", SLURM_JOB_END_TIME=f"{NOW_S + 600:.0f}")
    assert limit.reason == f"SLURM ends job 123 at {AT:%Y-%m-%d %H:%M:%S}"
    assert stops_after(limit, clock) == 600 - 10 + 1


@pytest.mark.parametrize(
    ("max_time", "first"), [("5m", "guard.max_time=5m"), ("1h", "SLURM ends job 7 at")]
)
def test_the_earlier_end_counts(max_time: str, first: str) -> None:
    limit = deadline(max_time, Clock(), SLURM_JOB_ID="7", SLURM_JOB_END_TIME=f"{NOW_S + 600:.0f}")
    assert limit.reason.startswith(first)


def test_without_a_limit_it_is_never_near() -> None:
    clock = Clock()
    limit = deadline(None, clock)
    clock.now_s = 1e12
    assert (limit.reason, limit.near(1e9, 1e9)) == ("", False)


@pytest.mark.parametrize("end_time", [f"{NOW_S - 1:.0f}", "soon", "-1", "9" * 400])
def test_an_end_that_is_over_or_no_number_is_ignored(end_time: str, tmp_path: Path) -> None:
    limit = deadline(
        None, Clock(), SLURM_JOB_ID="123", SLURM_JOB_END_TIME=end_time, PATH=str(tmp_path)
    )
    assert limit.reason == ""


def squeue(folder: Path, script: str) -> dict[str, str]:
    path = folder / "squeue"
    path.write_text(f'#!/bin/sh\necho "$@" > {folder / "asked"}\n{script}\n')
    path.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "SLURM_JOB_ID": "123"}


def test_squeue_is_asked_where_the_variable_is_missing(tmp_path: Path) -> None:
    clock = Clock()
    limit = deadline(None, clock, **squeue(tmp_path, f"echo {AT:%Y-%m-%dT%H:%M:%S}"))
    assert (tmp_path / "asked").read_text() == "-h -j 123 -o %e\n"
    assert limit.reason == f"SLURM ends job 123 at {AT:%Y-%m-%d %H:%M:%S}"
    assert stops_after(limit, clock) == 591


@pytest.mark.parametrize(
    "script",
    [
        "echo NONE",
        "echo N/A",
        "echo Unknown",
        "exit 0",
        f"echo {AT:%Y-%m-%dT%H:%M:%S}; exit 1",
        "kill $$",
    ],
)
def test_a_squeue_without_an_answer(tmp_path: Path, script: str) -> None:
    assert deadline(None, Clock(), **squeue(tmp_path, script)).reason == ""
    assert (tmp_path / "asked").exists()


def test_a_squeue_that_hangs(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    start = time.monotonic()
    assert (
        deadline(None, Clock(), **squeue(tmp_path, f"read answer < {tmp_path / 'never'}")).reason
        == ""
    )
    assert time.monotonic() - start > 4


def test_a_machine_without_squeue(tmp_path: Path) -> None:
    assert deadline(None, Clock(), PATH=str(tmp_path), SLURM_JOB_ID="123").reason == ""


def test_a_job_id_that_is_no_number_is_not_asked_for(tmp_path: Path) -> None:
    environ = squeue(tmp_path, "exit 0") | {"SLURM_JOB_ID": "1; rm -rf /"}
    assert deadline(None, Clock(), **environ).reason == ""
    assert not (tmp_path / "asked").exists()
