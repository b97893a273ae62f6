"""norm.kind in JAX: torch's numbers with batch, ghost and synchronized norms, on one rank and on
ranks with uneven shares."""

from __future__ import annotations

import re

import numpy as np
import pytest
from jax_norms_on_ranks import batch, learner, step
from pool import on_ranks
from ranks import HIGHEST_STAGE, needs_extra, needs_mpirun

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError
from hvdtrain.tasks.classification import Classification

pytestmark = [pytest.mark.usefixtures("jax_compilation_cache"), pytest.mark.in_turn]


def check_same(found: Arrays, expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-11, atol=1e-12, err_msg=name)


@pytest.mark.in_turn
@needs_extra("batch_norms")
@pytest.mark.parametrize("ghost", [1, 2, 3, 7, 50])
@pytest.mark.parametrize(
    ("words", "recompute"),
    [("norm.statistics=averaged", "none"), ("norm.statistics=sequential model.dense=[7,5]", "all")],
)
def test_ghost_norms_are_torchs(ghost: int, words: str, recompute: str) -> None:
    """Of 11 and of 12 samples, which take 12 rows, and of 3; a smaller last ghost is by itself."""
    given = ["norm.kind=ghost", f"norm.ghost={ghost}", *words.split()]
    torchs, jaxs = learner("torch", *given), learner("jax", *given, f"model.recompute={recompute}")
    jaxs.load(torchs.state())
    assert jaxs.state_dict_names() == torchs.state_dict_names()
    for number, sizes in enumerate([(11,), (12,), (11, 3)]):
        batches = [batch(n, 10 * number + n) for n in sizes]
        assert step(jaxs, batches, number, sum(sizes)) == pytest.approx(
            step(torchs, batches, number, sum(sizes)), rel=1e-12
        )
    check_same(jaxs.state(), torchs.state())
    sums = [
        {name: float(value) for name, value in one.evaluate(one.to_device(batch(7, 99))).items()}
        for one in (torchs, jaxs)
    ]
    assert sums[1] == pytest.approx(sums[0], rel=1e-12)


def test_batch_norms_are_torchs_and_a_skipped_step_leaves_their_buffers() -> None:
    torchs, jaxs = (learner(framework, "guard.nonfinite=skip") for framework in ("torch", "jax"))
    jaxs.load(torchs.state())
    for number in range(3):
        sums = [step(one, [batch(11, number), batch(0)], number, 11) for one in (torchs, jaxs)]
        assert sums[1] == pytest.approx(sums[0], rel=1e-12)
    check_same(jaxs.state(), torchs.state())
    before = jaxs.state()
    assert step(jaxs, [batch(11) | {"w": np.full(11, np.nan)}], 3, 11)["nonfinite"] == 1
    check_same(jaxs.state(), before)
    torchs.load(jaxs.state())
    assert step(jaxs, [batch(9)], 4, 9) == pytest.approx(step(torchs, [batch(9)], 4, 9), rel=1e-12)


@pytest.mark.in_turn
@needs_mpirun
@pytest.mark.parametrize(
    ("size", "words", "model"),
    [
        (2, "", ""),
        (2, HIGHEST_STAGE, ""),
        pytest.param(3, "", "", marks=pytest.mark.slow),
        pytest.param(
            2,
            "",
            "model.name=resnet18 model.small_images=true",
            marks=pytest.mark.slow,
            id="norms beside each other",
        ),
    ],
)
def test_synchronized_norms_of_ranks_are_the_norms_of_one(
    size: int, words: str, model: str
) -> None:
    """Of uneven shares, some of them empty; buffers are equal on all ranks without a collective."""
    for found in on_ranks("mpi", size, "jax_norms_on_ranks:synchronized", words, model):
        assert found.keys() == {"loss", "buffers", "state"} and max(found.values()) < (
            1e-10 if model else 1e-12
        ), found


@needs_mpirun
def test_local_statistics_become_their_mean_over_ranks() -> None:
    (first, found), (second, other) = on_ranks("mpi", 2, "jax_norms_on_ranks:local")
    assert found == other and found.keys() == first.keys() and len(found) == 6
    for name in found:
        np.testing.assert_allclose(
            found[name],
            (np.array(first[name]) + np.array(second[name])) / 2,
            rtol=1e-14,
            err_msg=name,
        )
    assert first["b.norm1.running_mean"] != second["b.norm1.running_mean"]


@needs_mpirun
def test_the_error_of_a_collective_keeps_its_type() -> None:
    assert (
        on_ranks("mpi", 2, "jax_norms_on_ranks:failing") == ["sync_norm.norm1.forward, after 1"] * 2
    )


# one value of a channel behind a convolution
SMALL = Classification((2, 2, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))


@pytest.mark.parametrize(
    ("words", "n"),
    [
        ("", 1),
        pytest.param("norm.kind=ghost norm.ghost=3", 7, marks=needs_extra("batch_norms")),
        pytest.param("norm.kind=ghost norm.ghost=1", 4, marks=needs_extra("batch_norms")),
    ],
)
def test_one_value_has_no_variance_in_the_words_of_torch(words: str, n: int) -> None:
    said = []
    for framework in ("torch", "jax"):
        one = learner(framework, "model.widths=[4]", *words.split(), task=SMALL)
        assert (
            not one.trains_one_sample() and learner(framework, *words.split()).trains_one_sample()
        )
        small = {"x": batch(n)["x"][:, :2, :2], "y": batch(n)["y"]}
        with pytest.raises(UserError) as caught:
            step(one, [small], 0, n)
        said.append(
            (re.sub(r" \(\(.*\)\)", "", caught.value.what), caught.value.where, caught.value.fix)
        )
    assert said[0] == said[1]


def test_a_model_without_norms_is_refused() -> None:
    with pytest.raises(
        UserError, match="the model has no batch norm layer, so norm.kind has no effect"
    ) as caught:
        learner("jax", "model.name=mlp", "norm.kind=ghost")
    assert (caught.value.where, caught.value.fix) == ("norm.kind=ghost", "norm.kind=batch")
