"""Horovod's documented calls on our engines on 1, 2 and 4 ranks; the same checks on Horovod itself,
and why it fails some."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import horovod_checks
import pytest
import ranks
from ranks import FULL, in_full_rounds, needs_horovod, needs_mpirun

NEW_DTYPES = "Horovod has no such dtype"
# Checks that Horovod 0.28.1 itself fails, and why; the same table is in docs/horovod-api.md.
DISAGREEMENTS = {
    **{
        name: NEW_DTYPES
        for name in horovod_checks.CHECKS
        if name.endswith((*horovod_checks.MORE_REDUCED,)) and "allreduce" in name
    },
    **{
        name: NEW_DTYPES
        for name in horovod_checks.CHECKS
        if name.endswith(horovod_checks.MORE_MOVED)
    },
    "layouts": "Horovod takes contiguous tensors of torch alone",
    "gradients_of_extremes": "Horovod's are no derivatives",
    "join_average": "Horovod divides by all ranks, those that have joined too",
}
# it counts the calls of a rank to name them: ranks wait for different names for ever
HANGS_HOROVOD = ("join_unnamed",)
# a segmentation fault in Horovod: a rank joins while a request of its own is under way
NOT_ON_HOROVOD = ("join_under_way",)


@functools.cache
def failures(module: str, engine: str, size: int) -> dict[str, str]:
    """{check: "" or its failure}; the ranks start once for all checks."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out.json")
        skipped = HANGS_HOROVOD * (module == "horovod.torch") + NOT_ON_HOROVOD * (
            engine == "horovod"
        )
        argv = ["tests/support/horovod_checks.py", module, str(out), ",".join(skipped)]
        env = {"HVDTRAIN_ENGINE": engine}
        result = ranks.mpirun(size, argv, env=env) if size > 1 else ranks.python(argv, env=env)
        assert result.returncode == 0, (
            f"rc {result.returncode} after {result.seconds:.0f} s\n{result.stdout}{result.stderr}"
        )
        return dict(json.loads(out.read_text()))


def failed(module: str, engine: str, size: int) -> dict[str, str]:
    return {name: failure for name, failure in failures(module, engine, size).items() if failure}


@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "size"),
    [
        ("single", 1),
        ("mpi", 2),
        pytest.param("torchdist", 2, marks=pytest.mark.slow),
        *[
            pytest.param("mpi", 4, marks=[pytest.mark.slow, pytest.mark.ranks4]),
            pytest.param("mpi", 1, marks=pytest.mark.slow),
            pytest.param("torchdist", 4, marks=[pytest.mark.slow, pytest.mark.ranks4]),
        ]
        * FULL,
    ],
)
def test_our_engines_pass_every_check(engine: str, size: int) -> None:
    assert failed("hvdtrain.horovod", engine, size) == {}


@needs_mpirun
@needs_horovod
@pytest.mark.slow
# it is about Horovod, of which no version comes any more, and which has hung here, once in a dozen
# runs on a busy machine
@in_full_rounds
@pytest.mark.parametrize("size", [1, 2])
def test_horovod_itself_fails_what_the_table_says_and_nothing_else(size: int) -> None:
    known = {name for name in DISAGREEMENTS if size > 1 or name != "join_average"}
    assert set(failed("horovod.torch", "horovod", size)) == known


@needs_mpirun
@needs_horovod
@pytest.mark.slow
def test_the_horovod_engine_passes_what_horovod_does_and_new_dtypes_where_they_are_moved() -> None:
    found = failed("hvdtrain.horovod", "horovod", 2)
    assert set(found) <= {
        name for name, why in DISAGREEMENTS.items() if why != NEW_DTYPES or "allreduce" in name
    }
