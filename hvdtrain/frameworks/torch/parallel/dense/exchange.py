"""Rows of tensors between ranks: each rank's rows reach all ranks; and the opposite, sums over ranks that go back to the rows' ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator

Sizes = Sequence[int]  # rows of each rank, the same on all ranks; some may be 0
Wait = Callable[[], torch.Tensor]


class Exchange:
    """start_gather() and start_sum() are adjoint to each other: one is the other's backward pass where the loss is the sum over ranks.

    Where several ranks have rows, each sends as many as the one with most, so that all parts of a collective are of one size; where one
    alone has rows, it is a broadcast from it, or a reduction to it. Every rank calls both with the same sizes and names. With an engine
    that is not "asynchronous" they wait.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size

    def _ready(self, x: torch.Tensor) -> torch.Tensor:
        """Without a gradient, in host memory unless the engine takes that of a GPU."""
        return x.detach() if "device_memory" in self._communicator.features else x.detach().cpu()

    def rows_of_ranks(self, own: int) -> list[int]:
        """A collective: how many rows each rank has."""
        return [int(rows) for rows in self._communicator.allgather(np.array([own]), "dense.rows_of_ranks")]

    def start_gather(self, own: torch.Tensor, sizes: Sizes, name: str) -> Wait:
        """own (sizes[rank], ...) -> (sum of sizes, ...), the rows of all ranks in rank order. `own` stays as it is."""
        assert len(own) == sizes[self.rank], (own.shape, sizes)
        device, sent = own.device, self._ready(own)
        if (only := _only(sizes)) is not None:
            rows = sent.contiguous() if only == self.rank else sent.new_empty(sizes[only], *sent.shape[1:])
            handle = self._communicator.start_broadcast(rows, name, only)
            return lambda: handle.wait().to(device)
        parts = sent.new_empty(self.size, max(sizes), *sent.shape[1:])
        parts[self.rank, : len(sent)] = sent
        handle = self._communicator.start_spread(parts.view(-1), name)
        return lambda: _without_padding(handle.wait().view(parts.shape), sizes).to(device)

    def start_sum(self, x: torch.Tensor, sizes: Sizes, name: str) -> Wait:
        """x (sum of sizes, ...) -> (sizes[rank], ...), the sum over ranks of the rank's own rows. `x` stays as it is."""
        assert len(x) == sum(sizes), (x.shape, sizes)
        device, sent = x.device, self._ready(x)
        if (only := _only(sizes)) is not None:
            handle = self._communicator.start_reduce(sent.clone(memory_format=torch.contiguous_format), name, only)
            return lambda: handle.wait()[: sizes[self.rank]].to(device)
        parts = sent.new_zeros(self.size, max(sizes), *sent.shape[1:])
        for part, rows in zip(parts, sent.split(list(sizes)), strict=True):
            part[: len(rows)] = rows
        handle = self._communicator.start_reduce_scatter(parts.view(-1), name)
        return lambda: handle.wait().view(parts.shape[1:])[: sizes[self.rank]].to(device)


def _only(sizes: Sizes) -> int | None:
    """The rank that alone has rows."""
    holders = [rank for rank, rows in enumerate(sizes) if rows]
    return holders[0] if len(holders) == 1 else None


def _without_padding(parts: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """(ranks, most rows, ...) -> (sum of sizes, ...)"""
    if min(sizes) == max(sizes):
        return parts.flatten(0, 1)
    return torch.cat([part[:rows] for part, rows in zip(parts, sizes, strict=True)])


class GatherColumns(torch.autograd.Function):
    """own (n, widths[rank]) -> (n, sum of widths) on all ranks; backward: the sum over ranks of the gradient of the rank's columns."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, exchange: Exchange, widths: Sizes, name: str) -> torch.Tensor:
        ctx.exchange, ctx.widths, ctx.name = exchange, widths, name
        return exchange.start_gather(own.T, widths, name)().T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.exchange.start_sum(gradient.T, ctx.widths, f"{ctx.name}.gradient")().T, None, None, None
