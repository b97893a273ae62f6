"""Every engine implements the Communicator protocol on 1, 2 and 4 ranks, and one failed rank ends
all."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import conformance
import pytest
import ranks
from pool import on_ranks
from ranks import ENGINES, FULL, ONE_ENGINE, needs_horovod, needs_mpirun
from waiting import wait_until

from hvdtrain import errors
from hvdtrain.comm.communicator import Buffer, CompletedHandle, Handle, SingleProcessCommunicator
from hvdtrain.comm.horovod import horovod_variables
from hvdtrain.config.sections.comm import CommConfig

# What a rank does in the tests below; the exit code and the words of a UserError are those of the
# real commands.
PRELUDE = """
import os, sys, time
import numpy as np
from hvdtrain import errors
from hvdtrain.config import plugins
from hvdtrain.comm.launcher_variables import NO_LAUNCHER, placement
def connect(place):
    try:
        return plugins.load("comm", sys.argv[1], "tests").connect(place)
    except errors.UserError as error:
        print(error, file=sys.stderr)
        sys.exit(errors.USER)
"""
RANK_AND_SIZE = (
    PRELUDE
    + "engine = connect(placement(os.environ)); print('rank', engine.rank, 'of', engine.size)"
)
ABORT = """
engine = connect(placement(os.environ))
engine.allreduce(np.ones(3), "first")
if engine.rank == 1:
    time.sleep(0.5)  # rank 0 is inside its allreduce; where it is not, the end is the same
    print("aborted", end="")  # without a newline: abort flushes it
    engine.abort(7)
engine.allreduce(np.ones(3), "second")
print("a rank went on")
"""
# Without the launcher's word: local rank and local size are the library's.
WAIT = """
engine = connect(NO_LAUNCHER)
engine.allreduce(np.ones(3), "first")
print(f"rank {engine.rank} of {engine.size}, local size {engine.local_size}, waits", flush=True)
if engine.rank == 0:
    engine.allreduce(np.ones(3), "second")
time.sleep(1e6)
"""


def conformance_of(engine: str, size: int) -> dict[str, str]:
    """{check: "" or its failure}; MPI starts once for all checks, and not at all for one rank,
    which no launcher starts."""
    if engine == "single":
        return conformance.failures(SingleProcessCommunicator())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        argv = ["tests/support/conformance.py", engine, str(out)]
        result = ranks.mpirun(size, argv) if size > 1 else ranks.python(argv)
        if result.returncode or not out.exists():
            why = (
                f"rc {result.returncode} after {result.seconds:.0f} "
                f"s\n{result.stdout}{result.stderr}"
            )
            return dict.fromkeys(conformance.checks_of(engine), why)
        return dict(json.loads(out.read_text()))


def pairs() -> list[Any]:
    """Every engine at every size."""
    marks = {
        "single": [],
        "mpi": [needs_mpirun],
        "horovod": [needs_mpirun, needs_horovod],
        "torchdist": [needs_mpirun],
    }
    sizes = [
        ("single", 1),
        *(
            (communicator, size)
            for communicator in ("mpi", "horovod", "torchdist")
            for size in ((1, 2, 4) if FULL else (1, 2, 3) if communicator == "mpi" else (2,))
        ),
    ]
    return [
        pytest.param(
            communicator,
            size,
            id=f"{communicator}-x{size}",
            marks=[
                *marks[communicator],
                *[pytest.mark.ranks4] * (size == 4),
                *[pytest.mark.slow] * (size > 2),
            ],
        )
        for communicator, size in sizes
    ]


@pytest.mark.in_turn
@pytest.mark.parametrize(("engine", "size"), pairs())
def test_conformance(engine: str, size: int) -> None:
    found = conformance_of(engine, size)
    assert (
        found.keys() == conformance.checks_of(engine).keys()
        and {check: failure for check, failure in found.items() if failure} == {}
    )


class Idle(SingleProcessCommunicator):
    """An engine of two ranks whose collectives and messages do nothing."""

    name = "idle"
    features = SingleProcessCommunicator.features | {"p2p"}

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.size = 2
        self.local_rank = rank
        self.local_size = 2

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        return CompletedHandle(x)

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        return CompletedHandle(x)


def idle_failures() -> dict[str, list[str]]:
    by_rank = [conformance.failures(Idle(rank)) for rank in range(2)]
    return {check: [found[check] for found in by_rank if found[check]] for check in by_rank[0]}


def test_every_check_fails_on_an_engine_that_does_nothing() -> None:
    found = idle_failures()
    assert [check for check in conformance.checks_of("idle") if not found[check]] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_of_size_1_under_a_launcher_of_4_is_refused(engine: str) -> None:
    """The variables say 4 processes, but this one was started alone, as with an MPI library that is
    not the launcher's."""
    environ = {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    }
    result = ranks.python(["-c", RANK_AND_SIZE, engine], env=environ)
    assert result.returncode == errors.USER
    assert (
        f"Open MPI's mpirun started 4 processes, but the {engine} engine sees only itself (size 1)"
        in result.stderr
    )
    assert (
        f"where: comm.engine={engine}; {'mpi4py' if engine == 'mpi' else 'Horovod'} uses Open MPI v"
        in result.stderr
    )
    assert "fix: hvdtrain launch -np 2 -- ..., which finds " in result.stderr
    assert "rank" not in result.stdout


@needs_mpirun
@needs_horovod
def test_horovod_that_runs_on_gloo_under_mpirun_is_refused() -> None:
    result = ranks.mpirun(
        2,
        ["-c", RANK_AND_SIZE, "horovod"],
        env={"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"},
    )
    assert result.returncode == errors.USER
    assert "started 2 processes, but the horovod engine sees only itself (size 1)" in result.stderr
    assert "Horovod uses Gloo, not MPI" in result.stderr


@pytest.mark.parametrize("engine", ["mpi", "horovod"])
def test_a_library_that_is_not_installed_is_named(engine: str, tmp_path: Path) -> None:
    package = "mpi4py" if engine == "mpi" else "horovod"
    (tmp_path / f"{package}.py").write_text(f"raise ImportError('no {package} here')")
    result = ranks.python(
        ["-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{RANK_AND_SIZE}", engine]
    )
    assert result.returncode == errors.USER
    assert f"no {package} here" in result.stderr
    assert (
        f"fix: {'pip install mpi4py' if engine == 'mpi' else 'python -m hvdtrain.cli.horovod'}"
        in result.stderr
    )


@pytest.mark.parametrize("engine", ONE_ENGINE["horovod"])
def test_abort_ends_every_rank(engine: str) -> None:
    result = ranks.mpirun(2, ["-c", PRELUDE + ABORT, engine])
    assert result.returncode == 7
    assert "aborted" in result.stdout and "a rank went on" not in result.stdout


@pytest.mark.parametrize("engine", ONE_ENGINE["mpi"])
def test_a_killed_rank_ends_every_rank(engine: str) -> None:
    with ranks.Job(2, ["-c", PRELUDE + WAIT, engine]) as job:
        wait_until(lambda: job.output().count("of 2, local size 2, waits") == 2, "both ranks wait")
        os.kill(job.pids()[1], signal.SIGKILL)
        wait_until(lambda: not job.processes(), "all processes are gone")
        assert job.wait().returncode != 0


def test_abort_of_a_single_process() -> None:
    program = """
from hvdtrain.comm.communicator import Buffer, CompletedHandle, Handle, SingleProcessCommunicator
from hvdtrain.comm.horovod import horovod_variables
from hvdtrain.config.sections.comm import CommConfig
print("last words", end="")
try:
    SingleProcessCommunicator().abort(7)
finally:
    print("went on")
"""
    result = ranks.python(["-c", program])
    assert (result.returncode, result.stdout) == (7, "last words")


@needs_mpirun
def test_small_parts_go_in_one_call_of_mpi_and_weights_in_any_size() -> None:
    """The ways that took less time on 2 to 4 ranks (docs/performance.md)."""
    for numbers, reduction in (
        (7, ["Reduce_scatter"]),
        (3 * 2**13, ["Reduce_scatter"]),  # 64 KiB for each rank
        (3 * 2**13 + 1, ["Reduce"] * 3),
    ):
        for calls, error in on_ranks("mpi", 3, "one_call_on_ranks:calls_of_mpi", numbers):
            assert calls == [*reduction, "Allgatherv"] and error < 1e-15


def test_horovod_looks_ten_times_as_often_where_ranks_share_memory() -> None:
    default = CommConfig()
    on_one_host = {"HOROVOD_CYCLE_TIME": "0.1", "HOROVOD_FUSION_THRESHOLD": str(4 * 2**20)}
    assert horovod_variables(default, one_host=True, nccl=False) == on_one_host
    between_hosts = {"HOROVOD_FUSION_THRESHOLD": str(4 * 2**20)}
    assert horovod_variables(default, one_host=False, nccl=False) == between_hosts
    assert horovod_variables(default, one_host=True, nccl=True) == {}
    set_by_keys = CommConfig(cycle_ms=2, fusion_mb=0.5)
    assert horovod_variables(set_by_keys, one_host=True, nccl=False) == {
        "HOROVOD_CYCLE_TIME": "2.0",
        "HOROVOD_FUSION_THRESHOLD": str(2**19),
    }
