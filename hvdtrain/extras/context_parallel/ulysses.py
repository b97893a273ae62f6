"""Ulysses: ranks exchange positions for heads before attention, and back after it (Jacobs et al.
2023, arXiv:2309.14509)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hvdtrain.comm.communicator import part_of
from hvdtrain.extras.context_parallel.link import ContextLink
from hvdtrain.extras.context_parallel.positions import PositionsOfRanks


class Exchange(NamedTuple):
    """The all-to-all of a layer."""

    link: ContextLink
    layer: str  # the name of its module; the names of its messages contain it
    positions: PositionsOfRanks


def by_heads(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, exchange: Exchange
) -> list[torch.Tensor]:
    """Maps tensors (n, heads, own positions, features) to (n, heads / ranks, all positions,
    features): this rank's part of the heads. A collective, and so is its backward pass.

    A rank sends (ranks - 1) / ranks of each tensor.
    """
    return list(_ByHeads.apply(exchange, queries, keys, values))


def by_positions(outputs: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """The inverse of by_heads(), for one tensor."""
    found: torch.Tensor = _ByPositions.apply(exchange, outputs)
    return found


class _ByHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.exchange = exchange
        return _to_heads(tensors, exchange, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *_to_positions(gradients, ctx.exchange, "backward")


class _ByPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, exchange: Exchange, outputs: torch.Tensor) -> torch.Tensor:
        ctx.exchange = exchange
        return _to_positions((outputs,), exchange, "forward")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, _to_heads((gradient,), ctx.exchange, "backward")[0]


def _to_heads(
    tensors: tuple[torch.Tensor, ...], exchange: Exchange, direction: str
) -> tuple[torch.Tensor, ...]:
    """(n, heads, own positions, e) -> (n, own heads, positions, e)"""
    size = exchange.link.size

    def to(rank: int) -> list[torch.Tensor]:
        return [x[:, part_of(x.shape[1], rank, size)] for x in tensors]

    def shapes_from(rank: int) -> list[tuple[int, ...]]:
        count = exchange.positions.count(rank)
        return [(len(x), x.shape[1] // size, count, x.shape[3]) for x in tensors]

    received = _all_to_all(to, shapes_from, exchange, direction)
    return tuple(torch.cat(parts, 2) for parts in zip(*received, strict=True))


def _to_positions(
    tensors: tuple[torch.Tensor, ...], exchange: Exchange, direction: str
) -> tuple[torch.Tensor, ...]:
    """(n, own heads, positions, e) -> (n, heads, own positions, e)"""
    positions = exchange.positions

    def to(rank: int) -> list[torch.Tensor]:
        (chunk,) = positions.chunks(rank)
        return [x[:, :, chunk.start : chunk.stop] for x in tensors]

    def shapes_from(rank: int) -> list[tuple[int, ...]]:
        own = positions.count(exchange.link.rank)
        return [(*x.shape[:2], own, x.shape[3]) for x in tensors]

    received = _all_to_all(to, shapes_from, exchange, direction)
    return tuple(torch.cat(parts, 1) for parts in zip(*received, strict=True))


def _all_to_all(
    to: Callable[[int], list[torch.Tensor]],
    shapes_from: Callable[[int], list[tuple[int, ...]]],
    exchange: Exchange,
    direction: str,
) -> list[list[torch.Tensor]]:
    """Sends to(rank) to each rank; returns what each rank has sent to this one, in rank order."""
    link = exchange.link
    link.begin(exchange.layer, direction)
    name = f"context.{exchange.layer}.{direction}"
    own = to(link.rank)
    waits = {}
    sent = []
    for step in range(1, link.size):  # in each step, a rank sends to one and receives from one
        source = (link.rank - step) % link.size
        waits[source] = link.start_recv(shapes_from(source), own[0], source, name)
        rank = (link.rank + step) % link.size
        sent.append(link.start_send(to(rank), rank, name))
    found = [own if rank == link.rank else waits[rank]() for rank in range(link.size)]
    for handle in sent:
        link.wait(handle)
    return found
