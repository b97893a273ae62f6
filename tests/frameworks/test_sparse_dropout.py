"""Dropout by the gaps between dropped indices: the distribution of the indices, and what happens to
numbers and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from hvdtrain.frameworks.torch.sparse_dropout import LARGEST, SparseDropout, dropped_indices


@pytest.mark.parametrize("p", [0.001, 0.01, 0.1])
def test_each_index_is_dropped_with_probability_p(p: float) -> None:
    torch.manual_seed(3)
    count = 2000
    rounds = 400
    hits = torch.zeros(count)
    for _ in range(rounds):
        indices = dropped_indices(count, p)
        assert indices.numel() == indices.unique().numel() and (indices.diff() > 0).all()
        hits[indices] += 1
    deviation = math.sqrt(count * rounds * p * (1 - p))
    assert abs(hits.sum() - count * rounds * p) < 5 * deviation
    for part in (hits[:100], hits[-100:]):  # the ends as well as the middle
        assert abs(part.sum() - 100 * rounds * p) < 5 * math.sqrt(100 * rounds * p)


def test_gaps_are_geometric() -> None:
    torch.manual_seed(4)
    gaps = dropped_indices(2_000_000, 0.05).diff()
    for gap in (1, 2, 5, 20):
        share = (gaps == gap).double().mean()
        expected = 0.05 * 0.95 ** (gap - 1)
        assert abs(share - expected) < 5 * math.sqrt(expected / len(gaps))


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_scaled_or_zero_and_so_are_their_gradients(
    memory: torch.memory_format, dtype: torch.dtype
) -> None:
    layer = SparseDropout(0.08)
    x = (torch.rand(16, 5, 7, 9) + 1).to(dtype).to(memory_format=memory).requires_grad_()
    torch.manual_seed(5)
    y = layer(x)
    y.backward(torch.full_like(y, 3.0, memory_format=torch.contiguous_format))
    assert x.grad is not None and y.stride() == x.stride()
    kept = y != 0
    assert 0.05 < 1 - kept.double().mean() < 0.11
    torch.testing.assert_close(y[kept], (x / 0.92).to(dtype)[kept])
    torch.testing.assert_close(x.grad, torch.where(kept, 3.0 / 0.92, 0.0).to(dtype))
    torch.manual_seed(5)
    assert torch.equal(layer(x), y)


@pytest.mark.parametrize(("p", "training"), [(0.0, True), (LARGEST + 0.1, True), (0.05, False)])
def test_on_other_inputs_it_is_the_dropout_of_torch(p: float, training: bool) -> None:
    x = torch.rand(50, 40)
    layers = [kind(p).train(training) for kind in (SparseDropout, torch.nn.Dropout)]
    results = []
    for layer in layers:
        torch.manual_seed(6)
        results.append(layer(x))
    assert torch.equal(*results)
    assert SparseDropout(0.05)(x[:0]).shape == (0, 40)
    strided = x.t()[::2]
    assert SparseDropout(0.05)(strided).shape == strided.shape
