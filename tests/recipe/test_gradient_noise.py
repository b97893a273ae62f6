"""Gradient noise and the noise scale: against moments worked out by hand, and against a population
whose true value is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hvdtrain.core.metrics import add_sums
from hvdtrain.frameworks.torch.step import add_noise_
from hvdtrain.frameworks.torch.strategy import Shard
from hvdtrain.optim.clip import clip
from hvdtrain.recipe.noise import (
    NOISE_SCALE_KEYS,
    NoiseScale,
    noise_sums,
    noise_variance,
    sample_weights,
)


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


def test_noise_scale_of_a_known_population() -> None:
    """Per-sample gradients ~ N(G, diag), |G|^2 = 4, S = 400: B_noise = 100. Uneven ranks, one at
    times empty, a batch that doubles."""
    rng = np.random.default_rng(5)
    measured = NoiseScale(decay=1.0)
    mean = np.full(100, 0.2)
    deviation = np.full(100, 2.0)
    for reading in range(40):
        shares = [[10, 11, 12], [16, 0, 17], [20, 22, 24], [33, 0, 33]][reading // 10]
        batch = sum(shares)
        sums = dict.fromkeys(NOISE_SCALE_KEYS, 0.0)
        for _ in range(10):
            own = [
                (b * mean + deviation * rng.normal(size=(b, 100)).sum(0)) / batch for b in shares
            ]
            whole = sum(own)
            for g, b in zip(own, shares, strict=True):
                sums = add_sums(sums, noise_sums(g @ g, whole @ whole, b, batch, 3))
        fields = measured.update(sums)
    assert fields == {"noise_scale": measured.value}
    assert measured.noise / 400 == pytest.approx(400, rel=0.05)  # over 400 steps
    assert measured.signal / 400 == pytest.approx(4, rel=0.05)
    assert measured.value == pytest.approx(100, rel=0.1)


def test_noise_scale_without_a_signal_is_nan() -> None:
    measured = NoiseScale()
    assert measured.update({"loss": 1.0, "count": 3.0}) == {}
    all_on_one_rank = add_sums(noise_sums(2.0, 2.0, 8, 8, 2), noise_sums(0.0, 2.0, 0, 8, 2))
    assert math.isnan(measured.update(all_on_one_rank)["noise_scale"])
    assert (measured.noise, measured.signal) == (0, 0), "it says nothing"
    assert math.isnan(
        measured.update(
            {"excess": 1.2, "excess_inv": 0.1, "big": 0.4, "big_inv": 0.05, "steps": 1.0}
        )["noise_scale"]
    )
