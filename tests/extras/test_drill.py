"""drill: whom it kills, whom it refuses to kill, and what it measures."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from hvdtrain.errors import UserError
from hvdtrain.extras.drill.command import (
    Harm,
    Pause,
    RankProcess,
    choose,
    drill,
    find_ranks,
    harm_lines,
    measure,
    measure_pause,
    pause_lines,
    send,
    step_of,
)
from hvdtrain.training.lock_holder import this_process, to_bytes
from hvdtrain.training.run_lock import LOCK

RANKS = [
    RankProcess(0, 10, 1, 5),
    RankProcess(1, 11, 1, 5),
    RankProcess(2, 12, 1, 6),
    RankProcess(3, 13, 1, 6),
]


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as started:
        yield started
        started.kill()


def start_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_only_the_very_process_is_killed(process: subprocess.Popen[bytes]) -> None:
    start = start_of(process.pid)
    assert (
        not send(RankProcess(1, process.pid, start + 1, 1), signal.SIGKILL)
        and process.poll() is None
    )
    assert (
        send(RankProcess(1, process.pid, start, 1), signal.SIGKILL)
        and process.wait() == -signal.SIGKILL
    )
    assert not send(RankProcess(1, process.pid, start, 1), signal.SIGKILL)


def test_who_is_chosen() -> None:
    for seed in range(20):
        assert choose(RANKS, "rank", Random(seed))[0].rank in (1, 2, 3)
        assert [rank.rank for rank in choose(RANKS, "host", Random(seed))] in ([0, 1], [2, 3])
        assert choose(RANKS, "random", Random(seed)) == choose(RANKS, "random", Random(seed))
    assert choose(RANKS, "rank0", Random(1)) == RANKS[:1] == choose(RANKS[:1], "rank", Random(1))


def test_a_job_of_another_machine_or_that_is_over(
    tmp_path: Path, process: subprocess.Popen[bytes]
) -> None:
    with pytest.raises(UserError, match="no job runs in"):
        drill([str(tmp_path)])
    mine = this_process()
    (tmp_path / LOCK).write_bytes(to_bytes(mine._replace(machine="another", host="n7")))
    with pytest.raises(UserError, match="runs on n7\n"):
        find_ranks(tmp_path)
    (tmp_path / LOCK).write_bytes(
        to_bytes(mine._replace(pid=process.pid, process_start=start_of(process.pid) + 1))
    )
    with pytest.raises(UserError, match="no job runs in"):
        find_ranks(tmp_path)
    with pytest.raises(UserError, match="--kill all is not known"):
        drill([str(tmp_path), "--kill", "all"])


def test_what_is_measured() -> None:
    before = [{"kind": "step", "step": 120, "time": 100.1}]
    start = {"kind": "start", "step": 100, "time": 103.0}
    decisions = [{"kind": "failed", "time": 101.5}]
    assert (
        measure([1], 110, 100.0, before, decisions) is None
        and measure([1], 110, 100.0, [*before, start], decisions) is None
    )
    after = [*before, start, {"kind": "step", "step": 110, "time": 103.5}]
    assert measure([1], 110, 100.0, after, decisions) == Harm([1], 110, 1.5, 3.5, 20)
    assert measure([1], 110, 100.0, after, []) == Harm([1], 110, 3.0, 3.5, 20)
    # not 120, which was lost
    assert step_of(after) == 110 and step_of(after[:2]) == 100 and step_of([]) == 0
    shrunk = [
        {"kind": "lost", "step": 110, "time": 100.2},
        {"kind": "step", "step": 120, "time": 100.3},
    ]
    assert measure([1], 110, 100.0, shrunk, []) == Harm([1], 110, 0.2, 0.3, 0)
    table = harm_lines([Harm([1], 110, 1.5, 3.5, 20), Harm([0, 1], 210, None, None, None)])
    assert " ".join(table[1].split()) == "rank 1 110 1.50 s 3.50 s 20"
    assert " ".join(table[2].split()) == "rank 0,1 210 never never"
    assert table[3] == "resumes after 3.50 s (median of 1; 3.50 to 3.50)"


def test_what_is_said_of_a_pause() -> None:
    """Stopped from 100 to 102: the sync point at 102.5 has it; the one at 100.1 was on its way; and
    a stall that ends the job."""
    before = [{"kind": "step", "step": 10 * n, "time": 99.1 + 0.25 * n} for n in (1, 2, 3)]
    on_its_way = {"kind": "step", "step": 40, "time": 100.1, "slowest_rank": 0}
    after = {"kind": "step", "step": 50, "time": 102.5, "slowest_rank": 1}
    assert measure_pause([1], 100.0, 102.0, before, [on_its_way]) is None
    found = measure_pause([1], 100.0, 102.0, before, [on_its_way, after])
    assert found is not None
    assert found == Pause([1], 30, 2.0, 0.25, 2.4, 1, "", 0.5)
    stalled = measure_pause(
        [1],
        100.0,
        102.0,
        before,
        [{"kind": "failed", "step": 30, "time": 101.0, "reason": "no progress for 1 s"}],
    )
    assert stalled is not None and stalled == Pause(
        [1], 30, 2.0, 0.25, None, None, "failed: no progress for 1 s", None
    )
    table = [
        " ".join(line.split())
        for line in pause_lines([found, stalled, found._replace(slowest_rank=0)])
    ]
    assert table[1:] == [
        "rank 1 30 2.00 s 2.40 s 0.25 s slowest is rank 1",
        "rank 1 30 2.00 s - 0.25 s failed: no progress for 1 s",
        "rank 1 30 2.00 s 2.40 s 0.25 s slowest is rank 0, which was not paused",
    ]
