"""Adasum: a sum that adds orthogonal vectors and averages parallel ones (Maleki et al. 2020, arXiv:2006.02924)."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator, point_to_point

TAG = 21  # of its messages


def combine(a: torch.Tensor, b: torch.Tensor, aa: float, bb: float, ab: float) -> torch.Tensor:
    """Adasum of two vectors (section 3.1: (1 - ab / 2 aa) a + (1 - ab / 2 bb) b), or of a part of each; aa, bb, ab of the whole vectors."""
    of_a = 1.0 - ab / (2.0 * aa) if aa else 1.0
    of_b = 1.0 - ab / (2.0 * bb) if bb else 1.0
    return a * of_a + b * of_b


def adasum_(communicator: Communicator, flat: torch.Tensor, name: str) -> None:
    """In place, of one vector of each rank: pairs of ranks, then pairs of pairs (section 4.2: halves of the vector, twice the distance).

    The ranks beyond the largest power of two come first: each adds its vector to that of a rank below. Products are float64.
    """
    if communicator.size == 1:
        return
    power = 1 << (communicator.size.bit_length() - 1)
    wire, rank = _Wire(point_to_point(communicator, f"Adasum {name!r}"), name), communicator.rank
    beyond = communicator.size - power
    if rank >= power:
        wire.send(flat, rank - power)
        flat.copy_(wire.receive(flat, rank - power))
        return
    if rank < beyond:
        other = wire.receive(flat, rank + power)
        flat.copy_(combine(flat, other, *_products(flat, other)))
    _halve_and_double_(wire, flat, rank, power)
    if rank < beyond:
        wire.send(flat, rank + power)


def _halve_and_double_(wire: _Wire, flat: torch.Tensor, rank: int, power: int) -> None:
    part, kept, distance = flat.clone(), [(0, flat.numel())], 1
    while distance < power:
        partner, is_lower = rank ^ distance, not rank & distance
        middle = part.numel() // 2
        mine, theirs = (part[:middle], part[middle:]) if is_lower else (part[middle:], part[:middle])
        other = wire.swap(theirs, mine, partner)
        a, b = (mine, other) if is_lower else (other, mine)
        products = torch.tensor(_products(a, b), dtype=torch.float64, device="cpu")
        step = 1
        while step <= distance:  # over the ranks that have the other parts of these two vectors
            products += wire.swap(products, products, rank ^ step)
            step *= 2
        part = combine(a, b, *products.tolist())
        start, end = kept[-1]
        kept.append((start, start + middle) if is_lower else (start + middle, end))
        distance *= 2
    _spread_(wire, flat, part, kept, rank)


def _spread_(wire: _Wire, flat: torch.Tensor, part: torch.Tensor, kept: list[tuple[int, int]], rank: int) -> None:
    """The parts of all ranks on every one, the way back. kept: the ranges that this rank has had, the whole first."""
    start, end = kept[-1]
    flat[start:end] = part
    for level in range(len(kept) - 2, -1, -1):
        (outer_start, outer_end), (start, end) = kept[level], kept[level + 1]
        missing = flat[end:outer_end] if start == outer_start else flat[outer_start:start]
        missing.copy_(wire.swap(flat[start:end], missing, rank ^ (1 << level)))


def _products(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float, float]:
    x, y = a.to(torch.float64), b.to(torch.float64)
    return float(x @ x), float(y @ y), float(x @ y)


class _Wire:
    """Messages between two ranks, in host memory: engines have none between devices."""

    def __init__(self, communicator: Any, name: str) -> None:
        self._communicator, self._name = communicator, name

    def send(self, x: torch.Tensor, to: int) -> None:
        self._communicator.start_send(x.cpu().contiguous(), to, self._name, TAG).wait()

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        found: torch.Tensor = self._communicator.start_recv(_on_host(like), source, self._name, TAG).wait()
        return found.to(like.device)

    def swap(self, mine: torch.Tensor, like: torch.Tensor, partner: int) -> torch.Tensor:
        """What the partner sends, a tensor like `like`."""
        receiving = self._communicator.start_recv(_on_host(like), partner, self._name, TAG)
        self._communicator.start_send(mine.cpu().contiguous(), partner, self._name, TAG).wait()
        found: torch.Tensor = receiving.wait()
        return found.to(like.device)


def _on_host(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")
