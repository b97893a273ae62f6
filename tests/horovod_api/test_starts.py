"""init() of some ranks, and again after shutdown(); the same bits twice; timelines of ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
from pool import alone
from ranks import FULL, needs_mpirun

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."


@needs_mpirun
@pytest.mark.slow
def test_ranks_start_in_parts_and_again_and_reduce_to_the_same_bits(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["tests/support/horovod_starts.py", str(out), str(tmp_path)]
    result = ranks.mpirun(3, argv, env={"HVDTRAIN_ENGINE": "mpi"})
    assert result.returncode == 0, result.stderr
    found = json.loads(out.read_text())
    # rank, size, sums of 1 + the ranks' numbers in the world
    refused = "rank 1 is not among the ranks [0, 2] of the job"
    assert found["some_ranks"] == [[0, 2, 4.0, 4.0], refused, [1, 2, 4.0, 4.0]]
    assert found["communicators"] == [
        [0, 2, 4.0, 4.0, 2.0],
        [0, 1, 2.0, 2.0, 1.0],
        [1, 2, 4.0, 4.0, 2.0],
    ]
    assert found["again"] == [[[rank, 3, 6.0, 6.0, 1], NOT_INITIALIZED] * 2 for rank in range(3)]
    assert found["bits"] == [[1, True]] * 3
    calls = {
        f"grad {i}": [["NEGOTIATE_ALLREDUCE", "[5000]", None], ["ALLREDUCE", "[5000]", 3]]
        for i in range(3)
    }
    calls["small"] = [["NEGOTIATE_BROADCAST", "[2]", None], ["BROADCAST", "[2]", 1]]
    calls["rows"] = [["NEGOTIATE_ALLGATHER", "[-1, 3]", None], ["ALLGATHER", "[-1, 3]", 1]]
    assert found["timeline"] == [[calls, calls, [True, False]]] * 3


RAISES_IN_INIT = """
import sys
import hvdtrain.horovod as hvd
hvd.init(comm=[0])
"""


WORKS_ALONE_AT_THE_END = """
import time
import torch
import hvdtrain.horovod as hvd
hvd.init()
hvd.allreduce(torch.ones(2))
if hvd.rank() == 0:
    time.sleep(6)
"""


@needs_mpirun
@pytest.mark.slow
@pytest.mark.clock
@pytest.mark.parametrize("engine", ["mpi", *["torchdist"] * FULL])
def test_after_a_stall_that_the_script_catches_ranks_leave_and_may_start_again(
    engine: str, tmp_path: Path
) -> None:
    env = {"HVDTRAIN_ENGINE": engine, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    result = ranks.mpirun(2, alone("late_ranks:main", str(tmp_path)), env=env)
    assert (result.returncode, result.stderr) == (0, "")
    errors = [
        "allreduce 'late': rank 1 did not come within 3 s",
        "allreduce 'late': rank 0 gave up waiting before all ranks came",
    ]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [[error, error, 3.0] for error in errors]


@needs_mpirun
@pytest.mark.slow
def test_at_the_end_a_rank_that_still_works_alone_is_waited_for_without_end() -> None:
    env = {"HVDTRAIN_ENGINE": "mpi", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "3"}
    result = ranks.mpirun(2, ["-c", WORKS_ALONE_AT_THE_END], env=env)
    assert (result.returncode, result.stderr) == (0, "")


@needs_mpirun
@pytest.mark.slow
def test_a_rank_that_init_refuses_ends_the_job() -> None:
    result = ranks.mpirun(2, ["-c", RAISES_IN_INIT], env={"HVDTRAIN_ENGINE": "mpi"})
    assert result.returncode not in (0, 124), result.stderr
    assert "rank 1 is not among the ranks [0] of the job" in result.stderr
