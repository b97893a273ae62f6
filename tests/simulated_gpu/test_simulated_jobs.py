"""Jobs on simulated GPUs: they compute what the CPU does, without waits, races or wrong devices."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import needs_mpirun
from simulated_gpu.build import compiler
from simulated_gpu.table import ALONE, ON_TWO, STEPS, WRONG_THREADS

pytestmark = [
    pytest.mark.simulated_gpu,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: g++ builds the simulated GPU"),
]


@pytest.mark.parametrize("name", ALONE)
def test_a_job_of_one_process(alone: dict[str, Any], name: str) -> None:
    found = alone["jobs"][name]
    assert "error" not in found, found["error"]
    gpu = found["gpu"]
    assert len(gpu["losses"]) == STEPS
    assert gpu["losses"] == pytest.approx(found["cpu"]["losses"], rel=1e-12)
    assert gpu["val"] == {
        name: pytest.approx(value, rel=1e-11) for name, value in found["cpu"]["val"].items()
    }
    assert gpu["races"] == []
    assert {device for _, device in gpu["devices"]} == {0}
    assert sum(gpu["waits"].values()) == ALONE[name].waits, gpu["waits"]


@needs_mpirun
@pytest.mark.parametrize("engine", ["mpi", "torchdist"])
@pytest.mark.parametrize("name", ON_TWO)
def test_a_job_of_two_ranks(
    alone: dict[str, Any], on_two: dict[str, Any], name: str, engine: str
) -> None:
    row = ON_TWO[name]
    expected = alone["jobs"][row.like]["cpu"]["losses"]
    ranks = on_two[engine][name]
    for rank, found in enumerate(ranks):
        assert found["losses"] == pytest.approx(expected, rel=1e-12)
        assert found["races"] == []
        others = {thread for thread, device in found["devices"] if device != rank}
        assert others <= WRONG_THREADS[engine], found["devices"]
        assert found["calls"] == ranks[0]["calls"]
        assert sum(found["waits"].values()) == row.waits[engine], found["waits"]
