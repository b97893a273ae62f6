"""Ranks that do not make the same calls end in seconds, with a message that names ranks and calls;
they never hang."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import ranks
from ranks import FULL, needs_mpirun

# Words of the message; where an exception ends a rank, MPI ends the others.
CASES = {
    "a call is missing on a rank": (
        "allreduce 'missing'",
        "rank 1 did not ask for it and cannot",
        "rank 1 waits for allreduce 'after'",
    ),
    "another shape of many": ("allreduce 'grad 5'", "shape (2000,) on rank 0, (2001,) on rank 1"),
    "another call": ("rank 0 waits for allreduce 'same'", "rank 1 waits for allgather 'same'"),
    "a rank ends without join": ("hvd.join()", "rank 1 ended without it"),
    "a poll of what does not come": ("allreduce 'polled ", "did not ask for it within 5 s"),
    "poll() in a loop": ("allreduce 'polled ", "did not ask for it and cannot"),
    "a failure that the script catches": ("rank 1 cannot end with the others", "no memory for it"),
    "a failure in a process set that the script catches": (
        "rank 0 cannot end with the others",
        "no memory for it",
    ),
    "roots differ": ("rank 0 waits for allgather 'broadcast_object.noname.0 of rank 0'",),
    "a rank ends": ("allreduce 'late'", "rank 1 ended without it; rank 0 asked for it"),
    "a rank fails": ("ValueError: its own reason",),
    "a rank does not come": ("allreduce 'late'", "rank 1 did not come within 5 s"),
    "a process set without threads": ("hvd.add_process_set()", "without MPI_THREAD_MULTIPLE"),
    "no barrier": ("rank 1 waits for allreduce 'after'", "rank 0 waits for barrier"),
}
FAST = ("a call is missing on a rank", "another shape of many", "a rank ends")
# what ranks decide does not depend on the engine, and test_agree.py has each kind of refusal
SLOW = {
    "mpi": (
        *(
            "a rank ends without join",
            "a poll of what does not come",
            "a process set without threads",
            "no barrier",
        ),
        "a failure in a process set that the script catches",
    ),
    "torchdist": ("a rank does not come",),
}
if FULL:
    SLOW = {
        "mpi": tuple(case for case in CASES if case not in FAST),
        "torchdist": tuple(case for case in CASES if "threads" not in case),
    }
ROWS = [("mpi", case) for case in FAST]
ROWS += [
    pytest.param(engine, case, marks=pytest.mark.slow)
    for engine, cases in SLOW.items()
    for case in cases
]


@needs_mpirun
@pytest.mark.parametrize(("engine", "case"), ROWS)
def test_ends_with_a_message_that_names_rank_and_call(case: str, engine: str) -> None:
    env = {
        "HVDTRAIN_ENGINE": engine,
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5" if "come" in case else "300",
    }
    result = ranks.mpirun(2, ["tests/support/wrong_programs.py", case], env=env)
    assert result.returncode not in (0, 124), result.stdout + result.stderr
    missing = [words for words in CASES[case] if words not in result.stderr]
    assert not missing, result.stderr


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(("engine", "size"), [("mpi", 3), *[("torchdist", 2)] * FULL])
def test_a_fault_in_a_random_program_is_told_on_every_rank_with_its_rank_and_call(
    engine: str, size: int, tmp_path: Path
) -> None:
    """A missing call, another shape, name or order, in programs of up to 13 collectives; the ranks
    start once for all of them."""
    assert run_random(engine, size, 80 if FULL else 4, tmp_path / "out.json")["wrong"] == {}


@needs_mpirun
@pytest.mark.slow
@pytest.mark.clock
def test_a_fault_is_told_within_seconds(tmp_path: Path) -> None:
    """It takes 2 s, until ranks that wait for each other are sure of it."""
    assert run_random("mpi", 3, 1, tmp_path / "out.json")["slowest_s"] < 20


def run_random(engine: str, size: int, programs: int, out: Path) -> dict[str, Any]:
    """What random_wrong_programs.py writes."""
    argv = ["tests/support/random_wrong_programs.py", "0", str(programs), str(out)]
    result = ranks.mpirun(size, argv, env={"HVDTRAIN_ENGINE": engine})
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(json.loads(out.read_text()))
