"""Hosts that come and go under `launch --elastic`: the job shrinks to those that are left and grows
back, with the curve of one host."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_hosts import Hosts
from faults import events, reached, same_end, supervisor, told, wait_for
from ranks import Job, needs_mpirun

from hvdtrain.errors import LOST, REQUEUE

pytestmark = [pytest.mark.cluster, needs_mpirun]
WORDS = [
    "data.name=synthetic",
    "data.shape=[16,16,1]",
    "data.samples=1440",
    "data.val_samples=48",
    "batch.size=24",
    "batch.evaluate=12",
    "model.name=linear",
    "framework=numpy",
    "comm.engine=mpi",
    "speed.precision=fp64",
    "epochs=1000",
    "checkpoint.every_steps=50",
]
# mpirun notices a host that is cut off after 3 + 2 x 1 s
FAST = {
    f"PRTE_MCA_oob_tcp_keepalive_{key}": value
    for key, value in {"time": "3", "intvl": "1", "probes": "2"}.items()
}


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


@pytest.fixture(autouse=True)
def whole(hosts: Hosts) -> Iterator[None]:
    yield
    hosts.heal("n2")
    hosts.clear()


def supervise(hosts: Hosts, run: Path, *options: str) -> Job:
    words = [
        *("-m", "hvdtrain", "launch", "--elastic", "--every", "1", "--answer", "10"),
        *options,
        "--",
        f"run={run}",
        *WORDS,
    ]
    return hosts.start("n1", [sys.executable, *words], env=FAST)


def ranks_now(run: Path) -> object:
    """Of the start that trains; None while none does."""
    lines = told(run)
    return lines[-1]["ranks"] if lines and lines[-1]["kind"] == "trains" else None


def test_one_of_two_hosts_is_cut_off_and_comes_back_and_a_third_joins(
    hosts: Hosts, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    offer = tmp_path / "offer"
    offer.write_text("#!/bin/sh\necho n1:1\necho n2:1\n")
    offer.chmod(0o755)
    with supervise(hosts, run, "--min", "1", "--max", "3", "--hosts-from", str(offer)) as job:
        wait_for(job, lambda: ranks_now(run) == 2 and reached(run) >= 100)
        hosts.cut("n2")
        cut_s = time.time()
        wait_for(job, lambda: ranks_now(run) == 1)
        shrunk_s = time.time()
        hosts.heal("n2")
        wait_for(job, lambda: ranks_now(run) == 2)
        grown_s = time.time()
        (tmp_path / "new").write_text("#!/bin/sh\necho n1:1\necho n2:1\necho n3:1\n")
        (tmp_path / "new").chmod(0o755)
        (tmp_path / "new").rename(offer)
        wait_for(job, lambda: ranks_now(run) == 3)
        os.kill(supervisor(job), signal.SIGTERM)
        result = job.wait()
    assert result.returncode == REQUEUE and events(run)[-1]["kind"] == "stop", result
    sizes = [(event["ranks"], event["hosts"]) for event in events(run) if event["kind"] == "start"]
    assert sizes[-4:] == [
        (2, ["n1", "n2"]),
        (1, ["n1"]),
        (2, ["n1", "n2"]),
        (3, ["n1", "n2", "n3"]),
    ]
    # mpirun ends with 0
    assert [(line["code"], line["hosts"]) for line in told(run) if line["kind"] == "lost"] == [
        (0, ["n2"])
    ]
    print(
        f"trains on n1 {shrunk_s - cut_s:.1f} s after the cut, on both {grown_s - shrunk_s:.1f} s "
        "after n2 is back"
    )
    with hosts.mpirun(
        "n1:1",
        ["-m", "hvdtrain", *WORDS, f"run={tmp_path / 'straight'}", f"stop.steps={reached(run)}"],
    ) as job:
        assert job.wait().returncode == 0
    same_end(run, tmp_path / "straight", reached(run))


def test_too_few_hosts_are_left(hosts: Hosts, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with supervise(hosts, run, "--min", "2", "--patience", "2", "-H", "n1:1,n2:1") as job:
        wait_for(job, lambda: reached(run) >= 100)
        hosts.cut("n2")
        result = job.wait()
    assert (
        result.returncode == LOST
        and "1 slots for 2 s, at least 2 are needed: given up, exit code 84" in result.stderr
    ), result
    assert [line["kind"] for line in told(run)] == [
        "start",
        "trains",
        "host_lost",
        "lost",
        "waits",
        "given_up",
    ]
