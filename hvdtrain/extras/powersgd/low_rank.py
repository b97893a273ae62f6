"""LowRank: the strategy that reduces each gradient matrix as a product of two thin ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.torch.strategy import (
    NamedParameters,
    Strategy,
    StrategyMemory,
    StrategyTensor,
    fill_missing,
    reduction_device,
)


class _Matrix:
    """The gradient of a parameter as a matrix (n, m), n the first dimension of the parameter."""

    def __init__(
        self, name: str, p: torch.nn.Parameter, rank: int, generator: torch.Generator
    ) -> None:
        self.name = name
        self.p = p
        rows = p.shape[0]
        columns = p.numel() // rows
        first = torch.randn(columns, min(rank, rows, columns), generator=generator)
        self.q = first.to(p.device, p.dtype)  # (m, rank), equal on all ranks
        # (n, m), what this rank's gradients had that no message had
        self.residual = torch.zeros(rows, columns, dtype=p.dtype, device=p.device)

    def take(self) -> None:
        """Adds the gradient to the residual."""
        assert self.p.grad is not None, self.name
        self.residual += self.p.grad.reshape(self.residual.shape)

    def project(self, p_hat: torch.Tensor) -> torch.Tensor:
        """Returns (m, rank), this rank's share of the sum of q, which leaves the residual. p_hat:
        (n, rank), orthonormal columns."""
        q = self.residual.T @ p_hat
        self.residual -= p_hat @ q.T
        return q

    def put(self, p_hat: torch.Tensor, q: torch.Tensor) -> None:
        """Makes the product the gradient. q: the sum over ranks."""
        assert self.p.grad is not None, self.name
        self.q = q
        self.p.grad.copy_((p_hat @ q.T).view(self.p.shape))


def _orthonormal(columns: torch.Tensor) -> torch.Tensor:
    """Returns an orthonormal basis of the columns of (n, rank), which have positive parts of their
    own basis vectors. LAPACK's signs follow the first row; where that is 0 but for rounding, they
    would depend on the number of ranks."""
    basis, parts = torch.linalg.qr(columns)
    return basis * torch.where(parts.diagonal() < 0, -1.0, 1.0).to(basis)


def _is_worth_it(p: torch.nn.Parameter, rank: int) -> bool:
    """Whether two thin matrices have fewer numbers than the gradient."""
    if p.ndim < 2 or not p.numel():
        return False
    columns = p.numel() // p.shape[0]
    return min(rank, p.shape[0], columns) * (p.shape[0] + columns) < p.numel()


class LowRank(Strategy):
    """PowerSGD (Vogels 2019, arXiv:1905.13727, alg. 1 and 2): one step of a power iteration for the
    sum M of the ranks' gradients and residuals.

    P = M Q is summed over ranks and made orthonormal, Q = M^T P is summed, and P Q^T is the
    gradient; the next step begins with this Q. Vectors, and matrices with fewer numbers than P and
    Q, are summed whole. A rank keeps M_i - P Q_i^T, its own part; the algorithm's text would also
    allow M_i - P Q^T, whose sum over ranks is the same, but which grows with how ranks differ.

    All of it is linear in the sum over ranks, so the result does not depend on the number of ranks
    (test_powersgd.py).
    """

    def __init__(
        self, named: NamedParameters, communicator: Communicator, rank: int, seed: int
    ) -> None:
        super().__init__(named)
        self._communicator = communicator
        generator = torch.Generator().manual_seed(seed)
        self._matrices = [
            _Matrix(name, p, rank, generator) for name, p in named if _is_worth_it(p, rank)
        ]
        compressed = {matrix.p for matrix in self._matrices}
        self._vectors = [p for p in self._trained if p not in compressed]
        before = sum(p.numel() for p in self._trained)
        after = sum(p.numel() for p in self._vectors) + sum(
            matrix.q.shape[1] * sum(matrix.residual.shape) for matrix in self._matrices
        )
        self.summary = (
            f"gradients of {len(self._matrices)} matrices at rank {rank} or less: {after:,} of "
            f"{before:,} numbers"
        )

    @property
    def equal_ranks(self) -> int:
        return self._communicator.size

    @torch.no_grad()
    def reduce(self) -> None:
        fill_missing(self._trained)
        for matrix in self._matrices:
            matrix.take()
        products = [matrix.residual @ matrix.q for matrix in self._matrices]
        vectors = [p.grad for p in self._vectors if p.grad is not None]
        sums = self._sum([*products, *vectors], "powersgd.p")
        for gradient, total in zip(vectors, sums[len(products) :], strict=True):
            gradient.copy_(total)
        p_hats = [_orthonormal(product) for product in sums[: len(products)]]
        shares = [
            matrix.project(p_hat) for matrix, p_hat in zip(self._matrices, p_hats, strict=True)
        ]
        for matrix, p_hat, q in zip(
            self._matrices, p_hats, self._sum(shares, "powersgd.q"), strict=True
        ):
            matrix.put(p_hat, q)

    def _sum(self, tensors: Sequence[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Returns sums over ranks, in one allreduce."""
        if not tensors:
            return []
        device = reduction_device(tensors[0].device, self._communicator)
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).to(device)
        summed = self._communicator.allreduce(flat, name).to(tensors[0].device)
        parts = summed.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def tensors(self) -> dict[str, StrategyTensor]:
        rank = self._communicator.rank
        size = self._communicator.size
        return {f"{m.name}@q": StrategyTensor(m.q) for m in self._matrices} | {
            f"{m.name}@residual": StrategyTensor(m.residual, size, rank) for m in self._matrices
        }

    def held(self) -> StrategyMemory:
        return StrategyMemory([], [t for m in self._matrices for t in (m.q, m.residual)])
