"""DistributedOptimizer, broadcasts of state and SyncBatchNorm: the weights of one process, on
ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
from ranks import FULL, needs_horovod, needs_mpirun


@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "size"),
    [
        ("mpi", 2),
        ("single", 1),
        *[
            pytest.param("mpi", 3, marks=pytest.mark.slow),
            pytest.param("torchdist", 2, marks=pytest.mark.slow),
            pytest.param("horovod", 2, marks=[pytest.mark.slow, needs_horovod]),
        ]
        * FULL,
    ],
)
def test_weights_are_those_of_one_process(engine: str, size: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    argv = ["tests/support/horovod_training.py", str(out)]
    env = {"HVDTRAIN_ENGINE": engine}
    result = ranks.mpirun(size, argv, env=env) if size > 1 else ranks.python(argv, env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert {name: failure for name, failure in json.loads(out.read_text()).items() if failure} == {}
