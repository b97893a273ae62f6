"""Gradient noise and clipping: against moments and numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hvdtrain.frameworks.torch.step import add_noise_
from hvdtrain.frameworks.torch.strategy import Shard
from hvdtrain.optim.clip import clip
from hvdtrain.recipe.noise import noise_variance, sample_weights


def test_sample_weights_have_mean_1_and_the_deviation_asked_for() -> None:
    z = sample_weights(3, 7, np.arange(200_000), 1.5)
    assert z.mean() == pytest.approx(1, abs=4 * 1.5 / math.sqrt(200_000))
    assert z.std() == pytest.approx(1.5, rel=0.01)
    assert ((z - 1) ** 4).mean() / 1.5**4 == pytest.approx(3, rel=0.03), (
        "a normal distribution's kurtosis"
    )
    assert abs(np.corrcoef(z[:-1], z[1:])[0, 1]) < 0.01


def test_sample_weights_do_not_depend_on_the_rank() -> None:
    rows = np.array([5, 900, 31, 7])
    whole = sample_weights(1, 2, rows, 0.5)
    np.testing.assert_array_equal(
        np.concatenate([sample_weights(1, 2, rows[:1], 0.5), sample_weights(1, 2, rows[1:], 0.5)]),
        whole,
    )
    for other in (sample_weights(2, 2, rows, 0.5), sample_weights(1, 3, rows, 0.5)):
        assert not np.isclose(other, whole).any()


def test_weighted_samples_have_the_covariance_of_the_small_batch() -> None:
    """M = 64 samples with s^2 = M / b - 1 = 3 have the variance of b = 16: (1 + s^2) / M = 1 / 16
    (Hoffer 2017, appendix A)."""
    g = np.random.default_rng(0).normal(size=(4000, 64))  # one number of the gradient, 4,000 steps
    z = np.stack([sample_weights(9, step, np.arange(64), math.sqrt(3)) for step in range(4000)])
    assert (z * g).mean(1).var() == pytest.approx(1 / 16, rel=0.08)
    assert g.mean(1).var() == pytest.approx(1 / 64, rel=0.08)


def test_annealed_noise_is_normal_and_the_same_for_the_same_seed() -> None:
    assert noise_variance(0.01, 0) == 0.01
    assert noise_variance(0.01, 999) == pytest.approx(0.01 * 1000**-0.55)
    p = [torch.nn.Parameter(torch.zeros(100_000)), torch.nn.Parameter(torch.zeros(3))]
    noisy = []
    for seed in (1, 1, 2):
        for q in p:
            q.grad = torch.full_like(q, 5.0)
        add_noise_([Shard(q, q, 0, q.numel()) for q in p], 0.04, seed)
        noisy.append(p[0].grad.clone())
    assert torch.equal(noisy[0], noisy[1]) and not torch.equal(noisy[0], noisy[2])
    assert float(noisy[0].mean()) == pytest.approx(5, abs=4 * 0.2 / math.sqrt(100_000))
    assert float(noisy[0].std()) == pytest.approx(0.2, rel=0.01)
    before = p[1].grad.clone()
    add_noise_([Shard(q, q, 0, q.numel()) for q in p], 0.0, 1)
    assert torch.equal(p[1].grad, before)


@pytest.mark.parametrize("xp", [np, torch], ids=["numpy", "torch"])
def test_clipping_by_hand(xp: object) -> None:
    """[3, -8] and [4] cut to 5: [3, -5], [4], of length sqrt(50); scaled to length 1."""
    given = [np.array([3.0, -8.0]), np.array([4.0])]
    g = [torch.from_numpy(a) for a in given] if xp is torch else given
    cut = clip(g, 1.0, 5.0, xp)
    np.testing.assert_allclose(
        np.concatenate(cut), np.array([3, -5, 4]) / math.sqrt(50), rtol=1e-15
    )
    # shorter than that: left alone
    np.testing.assert_array_equal(np.concatenate(clip(g, 100.0, None, xp)), [3, -8, 4])
    np.testing.assert_array_equal(
        np.concatenate(clip([0 * a for a in g], 1.0, None, xp)), [0, 0, 0]
    )
    assert [a.tolist() for a in given] == [[3, -8], [4]], "nothing is changed in place"
