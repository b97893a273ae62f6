"""Users' Datasets that fail on one of two ranks: that rank is named, all ranks end, and no worker
process is left."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from faults import events, wait_for
from ranks import ROOT, Job, mpirun, needs_mpirun
from waiting import wait_until

SUPPORT = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}"}
WORDS = ["-m", "hvdtrain", "model.name=mlp", "epochs=2", "batch.size=4", "comm.engine=mpi"]

pytestmark = [needs_mpirun, pytest.mark.faults]


def test_a_collate_function_that_gives_another_shape_on_one_rank(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = mpirun(
        2,
        [*WORDS, "data.name=own_datasets:ragged_on_rank_1", f"run={run}"],
        env={**SUPPORT, "RAGGED_RUN": str(run)},
    )
    assert ended.returncode == 2, ended.stderr
    found = re.search(
        r"sample \d+ of own_datasets:ragged_on_rank_1, train has x as float32 \(1, 3\), but the "
        r"first one as float32 \(2, 3\)",
        ended.stderr,
    )
    assert found and re.search(
        r"where: .*own_datasets\.py:\d+, ragged_on_rank_1\.<locals>\.collate", ended.stderr
    )
    assert (
        re.search(r"rank 1 on \S+: the error above ends the job", ended.stderr)
        and "rank 0 on" not in ended.stderr
    )


@pytest.mark.parametrize("end", ["rank", "worker"])
def test_a_killed_rank_or_worker_leaves_no_process(tmp_path: Path, end: str) -> None:
    words = [
        *WORDS,
        "data.name=own_datasets:noisy",
        "task.name=regression",
        "optim.base_lr=1e-9",
        "data.workers=1",
        "epochs=100000",
    ]
    run = tmp_path / "run"
    with Job(2, [*words, f"run={run}"], env=SUPPORT, is_warm=True) as job:
        # each has read
        wait_for(
            job,
            lambda: (
                any(event["kind"] == "epoch" for event in events(run)) and len(workers(job)) == 4
            ),
        )
        ranks = job.pids()
        started = workers(job)
        os.kill(ranks[1] if end == "rank" else started[0], signal.SIGKILL)
        ended = job.wait()
        assert ended.returncode not in (0, 124), ended.stderr
        if end == "worker":
            assert re.search(
                r"worker process \d+ of data\.workers ended by signal 9 while it read", ended.stderr
            )
        wait_until(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in started),
            "the end of the workers",
        )


def workers(job: Job) -> list[int]:
    return [pid for pid in job.processes() if b"hvdtrain.data.worker_pool" in command(pid)]


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
