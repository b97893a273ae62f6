"""The simulated GPU itself: what it raises, delays, counts and reports."""

from __future__ import annotations

from typing import Any

import pytest
from simulated_gpu.build import compiler

pytestmark = [
    pytest.mark.simulated_gpu,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler: g++ builds the simulated GPU"),
]
POISON = ["nan", "nan"]


def test_it_does_as_cuda_does_or_worse(alone: dict[str, Any]) -> None:
    found = alone["tool"]
    assert found["mixed_with_the_host"].startswith(
        "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and "
        "cpu!"
    )
    assert "cuda:0 and cuda:1!" in found["mixed_with_another_gpu"]
    assert found["fresh_memory"] == POISON
    assert found["copy_on_a_side_stream"] == [POISON, ["3.0", "6.0"]]
    assert found["freed_too_early"] == POISON
    assert found["kept_by_record_stream"] == ["2.0", "2.0"]
    assert found["copy_to_the_host"] == [POISON, ["1.0", "1.0"]]
    assert found["generator"]


def test_it_counts_what_the_host_waits_for(alone: dict[str, Any]) -> None:
    assert alone["tool"]["waits"] == {
        "item()": 1,
        "aten::nonzero": 1,
        "copy to the host": 1,
        "copy to the GPU": 1,
    }


def test_it_reports_work_that_no_event_orders(alone: dict[str, Any]) -> None:
    without, ordered = alone["tool"]["races"]
    assert without and ordered == []
    assert without[0].endswith(
        "what aten::fill_ wrote on the default stream of cuda:0, without waiting for it"
    )
