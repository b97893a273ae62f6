"""Ops.orthogonalize, on three frameworks, against the step of torch.optim.Muon and the formula by
singular values."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from hvdtrain.frameworks.torch.optim.rule_optimizer import TorchOps
from hvdtrain.optim.rule import ArrayOps

# tall, wide, square, alike, kernels: one alike, one tall
SHAPES = [
    (6, 4),
    (4, 6),
    (5, 5),
    (4, 6),
    (4, 3, 2, 1),
    (8, 2, 1, 2),
]
EPS = 1e-7


def matrices() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.normal(scale=10.0 ** (i - 2), size=shape) for i, shape in enumerate(SHAPES)] + [
        np.zeros((2, 3))
    ]


def by_singular_values(x: np.ndarray, rounds: int) -> np.ndarray:
    """The polynomial of each round, applied to the singular values alone: no product of matrices in
    common with ours."""
    u, s, v = np.linalg.svd(x.reshape(len(x), -1), full_matrices=False)
    s = s / max(float(np.linalg.norm(s)), EPS)
    for _ in range(rounds):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return ((u * s) @ v).reshape(x.shape)


@pytest.mark.in_turn
@pytest.mark.parametrize("rounds", [1, 5])
def test_the_rounds_change_the_singular_values_alone_on_every_framework(rounds: int) -> None:
    expected = [by_singular_values(x, rounds) for x in matrices()]
    on_torch = TorchOps().orthogonalize([torch.tensor(x) for x in matrices()], [], rounds, EPS, "")
    on_numpy = [ArrayOps(np).orthogonalize(x, x, rounds, EPS, "") for x in matrices()]
    with jax.enable_x64(True):
        on_jax = [
            ArrayOps(jax.numpy).orthogonalize(jax.numpy.array(x), x, rounds, EPS, "")
            for x in matrices()
        ]
    for ours in (on_torch, on_numpy, on_jax):
        for x, y in zip(ours, expected, strict=True):
            np.testing.assert_allclose(np.asarray(x), y, rtol=0, atol=1e-12)


def step_of_torch(x: torch.Tensor, rounds: int) -> torch.Tensor:
    """What torch.optim.Muon subtracts from a matrix, over its rate."""
    p = torch.nn.Parameter(torch.zeros_like(x))
    p.grad = x.clone()
    torch.optim.Muon(
        [p], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, eps=EPS, ns_steps=rounds
    ).step()
    return -p.detach() / max(1.0, x.shape[0] / x.shape[1]) ** 0.5


def test_it_is_the_step_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)  # its rounds in float64
    for x in (torch.tensor(x) for x in matrices() if x.ndim == 2):
        torch.testing.assert_close(
            TorchOps().orthogonalize([x], [], 5, EPS, "")[0],
            step_of_torch(x, 5),
            rtol=0,
            atol=1e-12,
        )


def test_one_round_in_bfloat16_is_that_of_torch() -> None:
    """Of five rounds up to 0.06 of difference is seen here: later rounds multiply that of
    rounding."""
    for x in (torch.tensor(x, dtype=torch.float32) for x in matrices() if x.ndim == 2):
        ours, exact = (
            TorchOps().orthogonalize([x], [], 1, EPS, dtype)[0] for dtype in ("bfloat16", "")
        )
        torch.testing.assert_close(ours, step_of_torch(x, 1), rtol=0, atol=0.03)
        assert not x.any() or 0 < (ours - exact).abs().max() < 0.03  # rounded, in fact


def test_what_cannot_be_orthogonalized() -> None:
    with pytest.raises(AssertionError):
        ArrayOps(np).orthogonalize(np.ones(4), np.ones(4), 5, EPS, "")
