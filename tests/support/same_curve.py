"""Checks that a job on many ranks equals the job on one process."""

from __future__ import annotations

import numpy as np
import pytest


def check_same(name: str, job: dict, one: dict) -> None:
    """Fails if the result of invariance.losses() for `job` differs from `one` by more than
    rounding, or if the job learned nothing."""
    losses = np.array(job["losses"])
    expected = np.array(one["losses"])
    assert len(losses) >= 4 and losses[-1] != losses[0], name
    assert np.abs(losses - expected).max() < 1e-12 * expected.max(), name
    assert job["evaluations"] == pytest.approx(one["evaluations"], rel=1e-12), name
    assert job["val"] == pytest.approx(one["val"], rel=1e-12), name
    assert job["weights"] == pytest.approx(one["weights"], rel=1e-12), name
    assert job["digests"] == 1, name
