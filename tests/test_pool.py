"""Ranks that wait for calls: one start for many, and another one after a call that fails, hangs or
leaves something behind."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from pool import on_ranks
from ranks import needs_mpirun
from waiting import wait_until

CALLS = """
import os, time

def who(communicator):
    return [os.getpid(), communicator.rank, communicator.allgather_object(communicator.rank + 1)]

def fails(communicator):
    if communicator.rank == 1:
        raise ValueError("of rank 1")
    communicator.allgather_object(0)

def hangs(communicator):
    time.sleep(3000)

def leaves(communicator):
    os.environ["LEFT_BEHIND"] = "1"
"""


@pytest.mark.in_turn
@needs_mpirun
def test_one_start_serves_many_calls_until_one_goes_wrong(tmp_path: Path) -> None:
    (tmp_path / "calls_of_this_test.py").write_text(CALLS)
    env = {"PYTHONPATH": str(tmp_path)}

    def call(name: str, limit_s: float = 900) -> list[list[int]]:
        return on_ranks("mpi", 2, f"calls_of_this_test:{name}", env=env, limit_s=limit_s)

    def pids() -> set[int]:
        found = call("who")
        assert [of_rank[1:] for of_rank in found] == [[0, [1, 2]], [1, [1, 2]]]
        return {pid for pid, *_ in found}

    first = pids()
    assert pids() == first
    for name, limit_s, said in (
        ("fails", 900, "rank 1:\nTraceback .*ValueError: of rank 1"),
        ("hangs", 6, "without an answer: ranks .0, 1."),
    ):
        with pytest.raises(AssertionError) as error:
            call(name, limit_s)
        assert re.search(said, str(error.value), re.DOTALL), error.value
        with pytest.raises(AssertionError, match="as before: "):
            call(name, limit_s)
        wait_until(
            lambda gone=first: not any(Path(f"/proc/{pid}").exists() for pid in gone),
            "the ranks are gone",
        )
        new = pids()
        assert not first & new
        first = new
    call("leaves")
    assert not first & pids() and "LEFT_BEHIND" not in os.environ
