"""The script of a custom loop, and what its results on several ranks must have in common with those
of one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from ranks import ROOT

SCRIPT = str(ROOT / "tests" / "support" / "own_loop_on_ranks.py")
STEPS = math.ceil(3 * 100 / 7)


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, weight in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], weight, rtol=0, atol=1e-12)
    assert (
        found["steps"] == expected["steps"]
        and found["lr"] == expected["lr"]
        and found["notes"] == expected["notes"]
    )
    for step, loss in found["losses"].items():
        assert loss == pytest.approx(expected["losses"][step], rel=1e-11, abs=1e-13), step
