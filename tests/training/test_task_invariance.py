"""Regression, labels, language with padding, a Dataset, a task of one's own: the same curve on any
number of ranks, in every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pool import on_ranks
from ranks import FULL, needs_horovod, needs_mpirun
from task_invariance import JOBS, WITHOUT

SAME = [  # jobs that compute the same numbers
    ["numpy", "jax", "torch", "torch, micro-batches"],
    ["numpy, absolute", "jax, absolute", "torch, absolute"],
    ["numpy, classes", "jax, classes", "torch, classes"],
    ["numpy, partly labelled", "jax, partly labelled", "torch, partly labelled"],
    ["numpy, labels", "jax, labels", "torch, labels"],
    ["padded", "padded, micro-batches and buckets"],
    ["padded, evaluated within epochs"],
    ["whole", "whole, micro-batches"],
    ["a Dataset with random augmentation", "the Dataset, its workers"],
    ["torch's Dataset with random augmentation", "torch's Dataset, its workers"],
    [
        "image gpt",
        "image gpt, recomputed",
        "image gpt, every second block recomputed, micro-batches",
    ],
    ["the user's own"],
]
SAME = [group for group in SAME if group[0] in JOBS]  # without the extra multilabel: no labels
GROUPS = [
    pytest.param(
        "mpi",
        2,
        ["no_jax", *["no_torch_workers"] * (not FULL)],
        marks=[needs_mpirun, pytest.mark.slow],
    ),
]
if FULL:
    GROUPS += [
        pytest.param("mpi", 2, [], marks=[needs_mpirun, pytest.mark.slow]),
        pytest.param(
            "mpi", 3, ["no_jax", "no_torch_workers"], marks=[needs_mpirun, pytest.mark.slow]
        ),
        pytest.param("horovod", 2, [], marks=[needs_mpirun, needs_horovod, pytest.mark.slow]),
        pytest.param("mpi", 4, [], marks=[needs_mpirun, pytest.mark.slow, pytest.mark.ranks4]),
        pytest.param("torchdist", 2, [], marks=[needs_mpirun, pytest.mark.slow]),
        pytest.param(
            "mpi", 4, ["datasets_alone"], marks=[needs_mpirun, pytest.mark.slow, pytest.mark.ranks4]
        ),
    ]


def curves(engine: str, size: int, *more: str) -> dict[str, Any]:
    found: dict[str, Any] = on_ranks(
        engine, size, "task_invariance:curves", engine, *more, env={"PYTHONPATH": ".:tests/support"}
    )[0]
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    """Of one process."""
    return curves("single", 1, "no_torch_workers")


def test_frameworks_and_micro_batches_compute_the_same(one: dict[str, Any]) -> None:
    check(one, one)
    for group in SAME:
        curve = one[group[0]]["losses"]
        assert len(curve) == 12 and curve[-1] < 0.95 * curve[0], group[0]


@pytest.mark.parametrize(("engine", "size", "words"), GROUPS)
def test_curves_are_those_of_one_rank(
    one: dict[str, Any], engine: str, size: int, words: list[str]
) -> None:
    many = curves(engine, size, *words)
    assert many.keys() == JOBS.keys() - {job for word in words for job in WITHOUT[word]}
    check(one, one | many)


def check(one: dict[str, Any], many: dict[str, Any]) -> None:
    assert JOBS.keys() == {job for group in SAME for job in group}
    for group in SAME:
        reference = one[group[0]]
        for job in [job for job in group if job in many]:
            found = many[job]
            assert found["digests"] == 1
            assert np.abs(np.array(found["losses"]) - reference["losses"]).max() < 1e-12 * max(
                reference["losses"]
            ), job
            assert found["evaluations"] == pytest.approx(reference["evaluations"], rel=1e-12), job
            # after steps 3, 5, 6, 9: an epoch is 4.2 steps
            assert len(found["evaluations"]) == (4 if "evaluated" in job else 0)
            assert found["weights"] == pytest.approx(reference["weights"], rel=1e-12), job
            assert (
                found["val"]["count"] == (13 if "evaluated" in job else 47)
                and found["val"].keys() == reference["val"].keys()
            ), job
            for name, total in found[
                "val"
            ].items():  # R2's sums start from the mean of the targets: they may be near 0
                assert total == pytest.approx(reference["val"][name], rel=1e-11, abs=1e-9), (
                    job,
                    name,
                )


@needs_mpirun
@pytest.mark.slow
def test_the_comparison_notices_ranks_that_count_their_own_tokens_alone(
    one: dict[str, Any],
) -> None:
    for job, found in curves("mpi", 2, "own_weights").items():
        assert np.abs(np.array(found["losses"]) - one[job]["losses"]).max() > 1e-3, job
