"""The same job on 1, 2, 3 or 4 ranks, on every engine and in every framework, gives the same loss
curve up to rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from invariance import FEW, JOBS, SGD, TIED
from pool import on_ranks
from ranks import ENGINES, FULL, needs_extra, needs_horovod, needs_mpirun
from rotation import rows_of_today

SIZES = [
    ("single", 1),
    ("mpi", 2),
    ("horovod", 2),
    *[("torchdist", 2), ("mpi", 3), ("mpi", 4), ("torchdist", 3), ("horovod", 3), ("horovod", 4)]
    * FULL,
]
EVERY_DAY = [("single", 1), ("mpi", 2)]


def marks(engine: str, size: int) -> list[pytest.MarkDecorator]:
    """One process and two ranks on mpi; the other groups, a minute each, are slow tests."""
    slow = (engine, size) not in EVERY_DAY
    return (
        [needs_horovod] * (engine == "horovod")
        + [pytest.mark.ranks4] * (size == 4)
        + [pytest.mark.slow] * slow
    )


GROUPS = [
    pytest.param(communicator, size, id=f"{communicator}-{size}", marks=marks(communicator, size))
    for communicator, size in SIZES
]
SAME = [  # jobs that compute the same numbers, with any framework and any way to reduce gradients
    [name for name in JOBS if "softmax" in name],
    [name for name in JOBS if "grown" in name and "sync" not in name],
    [name for name in JOBS if "mixed" in name],
    [name for name in JOBS if "least squares" in name],
    [name for name in JOBS if "mlp" in name and "RMSprop" not in name],
    [name for name in JOBS if name.startswith("torch convnet, sync norm") and "grown" not in name],
    ["torch with an unused layer"],
    ["torch mlp, RMSprop"],
    ["jax convnet, micro-batches"],
    [name for name in JOBS if name == "torch convnet, sync norm, grown"],
]
STATISTICS = "torch wide_resnet"  # whose curve depends on the ranks

Run = tuple[str, int, tuple[str, ...]]  # the engine, the ranks, the jobs


@pytest.fixture(scope="session")
def curves() -> dict[Run, dict]:
    """The losses of each job of a run, when a test first asks for it."""
    return {}


def jobs_on(engine: str, size: int) -> list[str]:
    """All jobs on one process, else few, unless all rows run. Of the runs of each day those of
    today; the others have days of their own."""
    of_today = {name for group in rows_of_today(SAME) for name in group} | {STATISTICS}
    jobs = JOBS if FULL or engine == "single" else FEW
    return [name for name in jobs if name in of_today or (engine, size) not in EVERY_DAY]


def run(curves: dict[Run, dict], engine: str, size: int, jobs: Sequence[str]) -> dict:
    """The jobs that are asked for, maybe among others."""
    for ran, found in curves.items():
        if ran[:2] == (engine, size) and set(jobs) <= found.keys():
            return found
    key = engine, size, tuple(jobs)
    curves[key] = on_ranks(engine, size, "invariance:curves", engine, "", jobs)[0]
    return curves[key]


def test_each_job_is_compared() -> None:
    assert {name for group in SAME for name in group} | {STATISTICS} == JOBS.keys()
    assert {*FEW, STATISTICS} <= JOBS.keys()


@pytest.mark.parametrize(("engine", "size"), GROUPS)
def test_loss_curves_are_those_of_one_rank(curves: dict, engine: str, size: int) -> None:
    jobs = jobs_on(engine, size)
    one = run(curves, "single", 1, jobs)
    many = run(curves, engine, size, jobs)
    assert set(jobs) <= many.keys() <= one.keys() <= JOBS.keys()
    assert {job: found["digests"] for job, found in many.items()} == dict.fromkeys(many, 1)
    statistics = many[STATISTICS]
    assert len(statistics["not_synced"]) == 26  # mean and variance of 13 norms
    assert max(statistics["not_synced"]) < 1e-12, "running statistics are not the mean over ranks"
    assert size == 1 or max(statistics["spread"]) > 1e-3, "each rank had its own before"
    for group in [group for group in SAME if group and group[0] in one]:
        reference = np.array(one[group[0]]["losses"])
        assert len(reference) == (20 if "sync" in group[0] else 60)
        # the loss of mixed labels has a floor
        bound = 0.95 if "mixed" in group[0] else 0.9 if "sync" in group[0] else 0.7
        assert reference[-1] < bound * reference[0], group[0]
        for job in many.keys() & group:
            assert (
                np.abs(np.array(many[job]["losses"]) - reference).max() < 1e-12 * reference.max()
            ), job
            assert many[job]["val"] == pytest.approx(one[group[0]]["val"], rel=1e-12), job
            assert many[job]["val"]["count"] == 360
            assert many[job]["weights"] == pytest.approx(one[group[0]]["weights"], rel=1e-11), job


@needs_mpirun
@pytest.mark.parametrize(
    ("engine", "size", "job", "way"),
    [
        pytest.param("mpi", 2, TIED, "parallel.tensor=2", marks=needs_extra("tensor")),
        pytest.param("mpi", 2, TIED, "parallel.pipeline=2", marks=needs_extra("pipeline")),
        pytest.param("horovod", 2, SGD, "comm.reduce=distributed_optimizer", marks=needs_horovod),
    ],
)
def test_other_ways_to_have_a_model_on_ranks_have_the_curve_of_one(
    engine: str, size: int, job: str, way: str
) -> None:
    """By SGD without clipping, which hides no gradient of another scale. More jobs are in the slow
    tests of each way."""
    one = on_ranks("single", 1, "invariance:curve", job)[0]
    many = on_ranks(engine, size, "invariance:curve", f"{job} {way}")[0]
    assert len(one["losses"]) == len(many["losses"]) == 4
    assert many["losses"] == pytest.approx(one["losses"], rel=1e-12) and many[
        "val"
    ] == pytest.approx(one["val"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES if FULL else ENGINES[:1])
def test_the_comparison_notices_an_allreduce_that_does_nothing(curves: dict, engine: str) -> None:
    one = run(curves, "single", 1, list(FEW))
    unreduced = on_ranks(engine, 2, "invariance:curves", engine, "unreduced")[0]
    assert {
        "torch softmax, buckets",
        "numpy softmax",
        "torch mlp, buckets and micro-batches",
    } <= unreduced.keys()
    for job, curve in unreduced.items():
        assert np.abs(np.array(curve["losses"]) - np.array(one[job]["losses"])).max() > 1e-3, job
