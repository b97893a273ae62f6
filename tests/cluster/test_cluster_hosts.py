"""Ranks on several hosts: placement, and the same result as on one host; a host that is cut off
ends the job, which resumes without it."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from cluster_hosts import Hosts
from faults import events, newest, reached, same_end, wait_for
from ranks import FULL, ROOT, Job, needs_horovod, needs_mpirun

from hvdtrain.comm.launcher_variables import placement
from hvdtrain.errors import LOST, REQUEUE, STALLED, UserError

pytestmark = [pytest.mark.cluster, needs_mpirun]
needs_torchdist = pytest.mark.skipif(
    not importlib.util.find_spec("hvdtrain.comm.torchdist"), reason="no torchdist engine here"
)
ENGINES = (
    "mpi",
    pytest.param("horovod", marks=needs_horovod),
    pytest.param("torchdist", marks=needs_torchdist),
)

# 300 steps, and a checkpoint at every second sync point; a batch of 24 divides among 8, 4 and 3
# ranks.
DATA = [
    "data.name=synthetic",
    "data.shape=[8,8,1]",
    "data.samples=1440",
    "data.val_samples=48",
    "batch.size=24",
    "batch.evaluate=12",
]
JOB = [
    "-m",
    "hvdtrain",
    *DATA,
    "model.name=linear",
    "speed.precision=fp64",
    "epochs=5",
    "checkpoint.every_steps=20",
    "guard.equal_steps=50",
]
STEPS = 300
# mpirun and its daemons notice a broken connection after time + probes x intvl seconds, here 5, and
# end the ranks
KEEPALIVE = {
    f"PRTE_MCA_oob_tcp_keepalive_{key}": value
    for key, value in {"time": "3", "intvl": "1", "probes": "2"}.items()
}
PROBE = """
import os, socket, sys, json, numpy
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.training.build import connect
engine, _ = connect(configure(None, [f"comm.engine={sys.argv[1]}"]), placement(os.environ))
total = engine.allreduce(numpy.array([10.0 ** engine.rank]), "sum")
given = [os.environ[name] for name in sys.argv[2:]]
table = engine.allgather_object(
    [socket.gethostname(), engine.local_rank, engine.local_size, total.tolist(), *given]
)
if engine.rank == 0:
    print(json.dumps(table))
engine.close()
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def one_host(hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an uninterrupted job on 8 ranks of one host."""
    run = tmp_path_factory.mktemp("one") / "run"
    with hosts.mpirun("n1:8", [*JOB, *of("mpi"), f"run={run}"]) as job:
        ended(job, run, ["n1"])
    return run


@pytest.fixture(autouse=True)
def whole(hosts: Hosts) -> Iterator[None]:
    """After each test the hosts are connected and empty again, however it ended."""
    yield
    hosts.heal("n2")
    hosts.clear()


def of(engine: str) -> list[str]:
    """The arguments for an engine; numpy where the engine imports no torch either: 8 ranks start in
    2 s instead of 17."""
    return [f"comm.engine={engine}", f"framework={'numpy' if engine == 'mpi' else 'torch'}"]


def ended(job: Job, run: Path, hosts: list[str]) -> None:
    """The job went to its last step, on these hosts."""
    result = job.wait()
    emitted = events(run)
    assert (result.returncode, emitted[-1]["kind"], emitted[-1]["step"]) == (0, "end", STEPS), (
        result
    )
    assert [event["hosts"] for event in emitted if event["kind"] == "start"][-1] == hosts
    assert re.search(r"^run folder: ", result.stdout, re.MULTILINE)


def same(run: Path, other: Path) -> None:
    same_end(run, other, STEPS)


def local_ranks(hosts: Hosts) -> dict[str, dict[int, int]]:
    """{host: {rank: local rank}}, by the environment of each process that runs there."""
    found: dict[str, dict[int, int]] = {}
    for name in hosts.names:
        for pid in hosts.pids(name):
            with suppress(OSError, UserError):
                pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
                place = placement(dict(pair.split("=", 1) for pair in pairs if "=" in pair))
                if place.launcher != "none":
                    found.setdefault(name, {})[place.rank] = place.local_rank
    return found


def ranks_left(hosts: Hosts) -> set[int]:
    """The processes that are left, except mpirun and its daemons."""
    found = set()
    for pid in hosts.pids():
        with suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(f"{sys.executable}\0".encode()):
                found.add(pid)
    return found


def gone(left: Callable[[], set[int]], limit_s: float = 300.0) -> float:
    """Seconds until nothing is left."""
    since_s = time.monotonic()
    while pids := left():
        assert time.monotonic() < since_s + limit_s, f"left after {limit_s:g} s: {pids}"
        time.sleep(0.1)
    return time.monotonic() - since_s


@pytest.mark.parametrize("engine", ENGINES)
def test_a_script_on_uneven_hosts(hosts: Hosts, tmp_path: Path, engine: str) -> None:
    """`launch -H n1:1,n2:2 -- probe.py`: each rank knows its host, its local rank, the size of the
    job, and rank 0's address."""
    (tmp_path / "probe.py").write_text(PROBE)
    words = [
        "launch",
        "-H",
        "n1:1,n2:2",
        "--logs",
        f"{tmp_path}",
        "--",
        str(tmp_path / "probe.py"),
        engine,
        "MASTER_ADDR",
        "GROUP_RANK",
    ]
    with hosts.start("n1", [sys.executable, "-m", "hvdtrain", *words]) as job:
        result = job.wait()
    assert result.returncode == 0, result
    table = json.dumps(
        [
            ["n1", 0, 1, [111.0], "n1", "0"],
            ["n2", 0, 2, [111.0], "n1", "1"],
            ["n2", 1, 2, [111.0], "n1", "1"],
        ]
    )
    assert (
        result.stdout.splitlines() == [f"[0] {table}"]
        and (tmp_path / "rank-0.log").read_text() == f"{table}\n"
    ), result
    assert sorted(path.name for path in tmp_path.glob("*.log")) == [
        "rank-0.log",
        "rank-1.log",
        "rank-2.log",
    ]


@pytest.mark.every_day
@pytest.mark.parametrize(
    "engine", ENGINES if FULL else ENGINES[:2]
)  # torchdist: test_a_host_is_lost
def test_two_hosts_train_as_one(hosts: Hosts, one_host: Path, tmp_path: Path, engine: str) -> None:
    # torch takes 2 s of a core to start
    run = tmp_path / "run"
    half = 4 if engine == "mpi" else 2
    with hosts.mpirun(f"n1:{half},n2:{half}", [*JOB, *of(engine), f"run={run}"]) as job:
        wait_for(job, lambda: reached(run))
        placed = local_ranks(hosts)
        ended(job, run, ["n1", "n2"])
    assert placed == {
        "n1": {rank: rank for rank in range(half)},
        "n2": {half + rank: rank for rank in range(half)},
    }
    same(run, one_host)
    assert not hosts.pids()


def test_through_sshd(one_host: Path, tmp_path: Path) -> None:
    """mpirun starts the ranks of the other host as on any cluster: through ssh."""
    run = tmp_path / "run"
    with (
        Hosts(2, ssh=True) as hosts,
        hosts.mpirun("n1:2,n2:2", [*JOB, *of("mpi"), f"run={run}"]) as job,
    ):
        ended(job, run, ["n1", "n2"])
    same(run, one_host)


def test_pbs_script(hosts: Hosts, one_host: Path, tmp_path: Path) -> None:
    """On the hosts that PBS names. After a signal, and after the loss of a host, the script submits
    itself again; the result is the same.

    PBS is faked: the test sets its variables, and qsub is a script that records its arguments.
    """
    run = tmp_path / "run"
    submitted = tmp_path / "submitted"
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\nn2\n")
    qsub = tmp_path / "bin" / "qsub"
    qsub.parent.mkdir()
    qsub.write_text(f'#!/bin/sh\necho "$RESTARTS $RUN $*" >> {submitted}\n')
    qsub.chmod(0o755)
    env = {
        "PBS_NODEFILE": str(nodes),
        "PBS_JOBID": "7.server",
        "PBS_O_WORKDIR": str(ROOT),
        "PYTHON": sys.executable,
        "RESTARTS": "3",
    }
    env |= {
        "QSUB": "-q long",
        "ARGUMENTS": " ".join([*JOB[2:], *of("mpi")]),
        "RUN": str(run),
        "PATH": f"{qsub.parent}:{os.environ['PATH']}",
    }
    with hosts.start("n1", ["bash", "jobs/pbs.sh"], env=env) as job:
        wait_for(job, lambda: reached(run) >= 20)
        (script,) = (
            pid
            for pid in hosts.pids("n1")
            if Path(f"/proc/{pid}/cmdline").read_bytes() == b"bash\0jobs/pbs.sh\0"
        )
        os.kill(script, signal.SIGUSR2)
        result = job.wait()
    assert (result.returncode, events(run)[-1]["kind"]) == (REQUEUE, "stop"), result
    assert (
        submitted.read_text()
        == f"2 {run} -q long -v PYTHON,RUN,MAX_TIME,RESTARTS,CONTAINER,ARGUMENTS,QSUB jobs/pbs.sh\n"
    )
    with hosts.start("n1", ["bash", "jobs/pbs.sh"], env=env | KEEPALIVE) as job:
        before = reached(run)
        wait_for(job, lambda: reached(run) >= before + 20)
        hosts.cut("n2")
        result = job.wait()
    hosts.heal("n2")
    assert (
        result.returncode == LOST
        and "the launcher ended with 0, but the job did not: a node was lost" in result.stderr
    ), result
    nodes.write_text("n1\nn1\n")
    with hosts.start("n1", ["bash", "jobs/pbs.sh"], env=env) as job:
        ended(job, run, ["n1"])
    same(run, one_host)
    assert len(submitted.read_text().splitlines()) == 2 and not hosts.pids()


@pytest.mark.parametrize("engine", ENGINES if FULL else [ENGINES[0], ENGINES[2]])
def test_a_host_is_lost(hosts: Hosts, one_host: Path, tmp_path: Path, engine: str) -> None:
    """mpirun ends all ranks on both sides of the cut, names the host, and exits 0; the other host
    alone resumes to the same result."""
    run = tmp_path / "run"
    # ranks without MPI outlive their daemon until then
    words = [
        *JOB,
        *of(engine),
        f"run={run}",
        "guard.stall_s=20",
    ]
    ranks = 4 if engine == "mpi" else 2  # on each host; torch takes 2 s of a core to start
    with hosts.mpirun(f"n1:{ranks},n2:{ranks}", words, env=KEEPALIVE) as job:
        # the step alone may be told before its checkpoint is there
        wait_for(job, lambda: newest(run) >= 40)
        hosts.cut("n2")
        seconds = gone(hosts.pids)
        result = job.wait()
    print(
        f"{engine}: all gone {seconds:.1f} s after the cut, mpirun's exit code {result.returncode}"
    )
    assert "lost communication with a remote daemon" in result.stderr and re.search(
        r"Remote daemon.*on node n2", result.stderr
    )
    hosts.heal("n2")
    assert 40 <= newest(run) < STEPS and events(run)[-1]["kind"] not in ("end", "stop")
    with hosts.mpirun(f"n1:{ranks}", words) as job:
        ended(job, run, ["n1"])
    same(run, one_host)


@pytest.mark.parametrize("engine", ENGINES if FULL else ENGINES[:1])
def test_a_lost_host_is_reported(hosts: Hosts, tmp_path: Path, engine: str) -> None:
    """Where mpirun notices nothing, hvdtrain's watchdog reports host and ranks, and ends the ranks
    on both sides."""
    run = tmp_path / "run"
    words = [*JOB, *of(engine), f"run={run}", "guard.stall_s=10"]
    with hosts.mpirun("n1:2,n2:2", words) as job:
        wait_for(job, lambda: reached(run) >= 40)
        hosts.cut("n2")
        seconds = gone(lambda: ranks_left(hosts))
        # mpirun waits for the other host's daemon until TCP gives up, about 15 minutes
        hosts.clear()
        text = job.wait().stderr
    print(f"{engine}: all ranks gone {seconds:.1f} s after the cut")
    assert f"no progress for 10 s (guard.stall_s); the job ends with exit code {STALLED}" in text
    assert re.search(r"no answer .*its host is down.*:\n +ranks 2-3 on n2\n", text), text
    assert re.search(r"waiting: ranks 0-1 at step", text)
