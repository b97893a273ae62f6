"""Communicators that continue without dead ranks: shrink() and confirm()."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lost_ranks import finish
from pool import alone
from ranks import Job, needs_mpirun

pytestmark = pytest.mark.faults


@needs_mpirun
def test_what_collectives_gave_before_a_loss_is_not_confirmed(tmp_path: Path) -> None:
    """One rank that finds the loss elsewhere does not leave another one waiting for it in
    confirm()."""
    out = tmp_path / "out.json"
    with Job(3, alone("confirm_on_ranks:main", str(out)), options=["--with-ft", "ulfm"]) as job:
        result = job.wait()
    assert out.exists(), result
    assert json.loads(out.read_text()) == [
        [0, [3.0], "", [2], False, [3.0]],
        [1, [3.0], "True, True", [2], False, [3.0]],
    ]


@pytest.mark.clock
@pytest.mark.ranks4
def test_ranks_that_wait_for_each_other_in_different_collectives_leave_both(tmp_path: Path) -> None:
    """torchdist: what a rank has begun with Gloo keeps it in the group, until the connections are
    cut: after the second of rank 2."""
    finish("torchdist", 4, alone("leave_on_ranks:main", str(tmp_path / "out")))
    found = sorted(json.loads(line) for line in (tmp_path / "out").read_text().splitlines())
    assert [of_rank[:3] + of_rank[4:] for of_rank in found] == [
        [first, first - 1, [0], [1110.0]] for first in (1, 2, 3)
    ]
    assert max(took_s for *_, took_s, _ in found) < 20, found
