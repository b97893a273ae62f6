"""The same job on 1, 2, 3 or 4 ranks, on every engine and in every framework, gives the same loss
curve up to rounding."""

from __future__ import annotations

import numpy as np
import pytest
from invariance import FEW, JOBS, SGD, TIED
from pool import on_ranks
from ranks import ENGINES, FULL, needs_horovod, needs_mpirun

SIZES = [
    ("single", 1),
    ("mpi", 2),
    ("horovod", 2),
    *[("torchdist", 2), ("mpi", 3), ("mpi", 4), ("torchdist", 3), ("horovod", 3), ("horovod", 4)]
    * FULL,
]


def marks(engine: str, size: int) -> list[pytest.MarkDecorator]:
    """One process and two ranks on mpi; the other groups, a minute each, are slow tests."""
    first = [("single", 1), ("mpi", 2)]
    slow = (engine, size) not in first
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
    [name for name in JOBS if "least squares" in name],
    [name for name in JOBS if "mlp" in name and "RMSprop" not in name],
    [name for name in JOBS if "mixed" in name],
    ["torch with an unused layer"],
    ["jax convnet, micro-batches"],
    [name for name in JOBS if "grown" in name and "sync" not in name],
    ["torch mlp, RMSprop"],
    ["torch convnet, sync norm", "torch convnet, sync norm, buckets"],
    ["torch convnet, sync norm, grown"],
]


@pytest.fixture(scope="session")
def curves() -> dict[str, dict]:
    """(engine, size) -> job -> losses, when a test first asks for it."""
    return {}


def jobs_on(engine: str) -> str:
    """What `how` is of the jobs of a group: all of them on one process."""
    return "" if FULL or engine == "single" else "few"


def run(curves: dict, engine: str, size: int, how: str) -> dict:
    key = f"{engine} x {size}, {how}"
    if engine == "single" and f"{engine} x {size}, " in curves:
        return dict(curves[f"{engine} x {size}, "])  # has the few among all
    if key not in curves:
        curves[key] = on_ranks(engine, size, "invariance:curves", engine, how)[0]
    return curves[key]


@pytest.mark.parametrize(("engine", "size"), GROUPS)
def test_loss_curves_are_those_of_one_rank(curves: dict, engine: str, size: int) -> None:
    how = jobs_on(engine)
    one = run(curves, "single", 1, "few" if how == "few" else "")
    many = run(curves, engine, size, how)
    assert many.keys() == {"": JOBS, "few": FEW}[how].keys() <= one.keys() <= JOBS.keys()
    assert {job: found["digests"] for job, found in many.items()} == dict.fromkeys(many, 1)
    statistics = many["torch wide_resnet"]
    assert len(statistics["not_synced"]) == 26  # mean and variance of 13 norms
    assert max(statistics["not_synced"]) < 1e-12, "running statistics are not the mean over ranks"
    assert size == 1 or max(statistics["spread"]) > 1e-3, "each rank had its own before"
    for group in [group for group in SAME if group[0] in one]:
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
        ("mpi", 2, TIED, "parallel.tensor=2"),
        ("mpi", 2, TIED, "parallel.pipeline=2"),
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
    one = run(curves, "single", 1, "few")
    unreduced = on_ranks(engine, 2, "invariance:curves", engine, "unreduced")[0]
    assert {
        "torch softmax, buckets",
        "numpy softmax",
        "torch mlp, buckets and micro-batches",
    } <= unreduced.keys()
    for job, curve in unreduced.items():
        assert np.abs(np.array(curve["losses"]) - np.array(one[job]["losses"])).max() > 1e-3, job
