"""A Horovod user's script on Horovod and on our engines: the same losses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import ranks
from ranks import FULL, needs_horovod, needs_mpirun


def losses(module: str, engine: str, size: int, folder: Path, *words: str) -> list[float]:
    """The loss of each epoch, and the accuracy."""
    out = folder / f"{module}-{engine}.json"
    argv = ["tests/support/horovod_script.py", module, str(out), *words]
    result = ranks.mpirun(size, argv, env={"HVDTRAIN_ENGINE": engine})
    assert result.returncode == 0, result.stderr
    return list(json.loads(out.read_text()))


@needs_mpirun
@needs_horovod
@pytest.mark.slow
@pytest.mark.parametrize("size", [2, *[pytest.param(4, marks=pytest.mark.ranks4)] * FULL])
def test_losses_are_those_of_horovod(size: int, tmp_path: Path) -> None:
    expected = losses("horovod.torch", "", size, tmp_path)
    assert expected[2] < expected[0] and expected[3] > 0.5, expected  # it learns
    for engine in ("mpi", "torchdist", "horovod") if FULL else ("mpi",):
        assert losses("hvdtrain.horovod", engine, size, tmp_path) == pytest.approx(
            expected, rel=1e-4
        ), engine
