"""Random programs against NumPy: the same results, whatever the order in which ranks begin and wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
from ranks import FULL, needs_mpirun

SLOW = [pytest.mark.slow]


@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "size", "programs"),
    [
        ("mpi", 2, 15),
        pytest.param("mpi", 2, 1000 if FULL else 60, marks=SLOW),
        pytest.param("mpi", 3, 1000 if FULL else 60, marks=SLOW),
        *[pytest.param("mpi", 4, 300, marks=[*SLOW, pytest.mark.ranks4])] * FULL,
        *[pytest.param("torchdist", 2, 300, marks=SLOW)] * FULL,
        pytest.param("torchdist", 3, 300 if FULL else 40, marks=SLOW),
    ],
)
def test_results_are_those_of_numpy(engine: str, size: int, programs: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["tests/support/random_programs.py", str(size * 10_000), str(programs), str(out)]
    result = ranks.mpirun(size, argv, timeout_s=280, env={"HVDTRAIN_ENGINE": engine})
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads(out.read_text()) == {}
