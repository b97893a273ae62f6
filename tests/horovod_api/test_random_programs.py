"""Random programs against NumPy: the same results, whatever the order in which ranks begin and
wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
from ranks import FULL, needs_mpirun

SLOW = [pytest.mark.slow]
A_START = 250  # programs that one start of the ranks runs: two minutes
TABLE = [
    ("mpi", 2, 1000, 0),
    ("mpi", 3, 1000, 30),
    ("mpi", 4, 1000, 0),
    ("torchdist", 2, 250, 0),
    ("torchdist", 3, 250, 0),
]
ROWS = [
    pytest.param(
        engine,
        size,
        first,
        A_START if FULL else some,
        marks=[*SLOW, *([pytest.mark.ranks4] * (size == 4))],
    )
    for engine, size, every, some in TABLE
    for first in range(0, every if FULL else min(some, 1), A_START)
]


@needs_mpirun
@pytest.mark.parametrize(("engine", "size", "first", "programs"), [("mpi", 2, 0, 15), *ROWS])
def test_results_are_those_of_numpy(
    engine: str, size: int, first: int, programs: int, tmp_path: Path
) -> None:
    out = tmp_path / "out.json"
    argv = ["tests/support/random_programs.py", str(size * 10_000 + first), str(programs), str(out)]
    result = ranks.mpirun(size, argv, env={"HVDTRAIN_ENGINE": engine})
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(out.read_text()) == {}
