"""The noise scale of gradients, against a population whose true value is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvdtrain.core.metrics import NOISE_SCALE_KEYS, add_sums
from hvdtrain.extras.noise_scale.scale import NoiseScale, noise_sums


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
