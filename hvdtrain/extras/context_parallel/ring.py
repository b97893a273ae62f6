"""Ring attention: keys and values go from rank to rank, and each rank attends to them with the
queries of its positions (Liu et al. 2023, arXiv:2310.01889)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hvdtrain.extras.context_parallel.blocks import (
    Attended,
    AttentionGradients,
    AttentionRule,
    attend,
    gradients,
)
from hvdtrain.extras.context_parallel.link import GRADIENTS, ContextLink
from hvdtrain.extras.context_parallel.positions import PositionsOfRanks


class RingLayer(NamedTuple):
    """A layer's attention over the positions of all ranks."""

    link: ContextLink
    layer: str  # the name of its module; the names of its messages contain it
    positions: PositionsOfRanks
    rule: AttentionRule

    def blocks(self, source: int) -> Iterator[tuple[range, slice, range, slice]]:
        """Yields the pairs of chunks of this rank's queries and of the keys of rank `source`, of
        which some attend, each with its rows in the rank's tensors. For a query, its own position
        comes first."""
        pairs = [
            (queries, rows, keys, columns)
            for queries, rows in _rows(self.positions.chunks(self.link.rank))
            for keys, columns in _rows(self.positions.chunks(source))
            if not self.rule.skips(queries, keys)
        ]
        yield from sorted(pairs, key=lambda pair: pair[0] != pair[2])


def _rows(chunks: Sequence[range]) -> Iterator[tuple[range, slice]]:
    """Yields chunks with their rows in a rank's tensors."""
    first = 0
    for chunk in chunks:
        yield chunk, slice(first, first + len(chunk))
        first += len(chunk)


def ring_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: RingLayer
) -> torch.Tensor:
    """Computes scaled_dot_product_attention() for the queries of this rank's positions, and the
    keys and values of all ranks. A collective, and so is its backward pass.

    queries (n, heads, own positions, e); keys and values of as many heads, or of a divisor of them
    -> (n, heads, own positions, features of values)

    Of A = samples x positions x features numbers of all keys, a rank sends 2 A (ranks - 1) / ranks
    numbers in the forward pass, and twice as many in the backward pass.
    """
    outputs: torch.Tensor = _Ring.apply(queries, keys, values, layer)
    return outputs


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: RingLayer,
    ) -> torch.Tensor:
        with torch.autocast(queries.device.type, enabled=False):
            attended = _forward(queries, keys, values, layer)
        outputs = attended.outputs.to(queries.dtype)
        ctx.save_for_backward(queries, keys, values, outputs, attended.log_sums)
        ctx.layer = layer
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, doutputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        queries, keys, values, outputs, log_sums = ctx.saved_tensors
        with torch.autocast(queries.device.type, enabled=False):
            found = _backward(
                queries, keys, values, Attended(outputs, log_sums), doutputs, ctx.layer
            )
        dq, dk, dv = (
            gradient.to(x.dtype) for gradient, x in zip(found, (queries, keys, values), strict=True)
        )
        return dq, dk, dv, None


def _forward(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: RingLayer
) -> Attended:
    link = layer.link
    link.begin(layer.layer, "forward")
    found: dict[int, Attended] = {}  # by the first row of a chunk of queries
    for source, received in _around(keys, values, layer, "forward"):
        theirs, their_values = (_for_heads(x, queries) for x in received)
        for of_queries, rows, of_keys, columns in layer.blocks(source):
            block = attend(
                queries[:, :, rows],
                theirs[:, :, columns],
                their_values[:, :, columns],
                of_queries,
                of_keys,
                layer.rule,
            )
            before = found.get(rows.start)
            found[rows.start] = block if before is None else before.merge(block)
    return Attended(
        *(torch.cat(parts, 2) for parts in zip(*(found[row] for row in sorted(found)), strict=True))
    )


def _backward(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attended: Attended,
    doutputs: torch.Tensor,
    layer: RingLayer,
) -> AttentionGradients:
    """Keys and values go around again. Their gradients follow them one rank behind: each rank adds
    what its queries give, and the last one returns them to their owner."""
    link = layer.link
    link.begin(layer.layer, "backward")
    dtype = attended.log_sums.dtype
    dq = torch.zeros_like(queries, dtype=dtype)
    own = [torch.zeros_like(x, dtype=dtype) for x in (keys, values)]
    sent = []
    for source, theirs in _around(keys, values, layer, "backward"):
        if source == link.rank:
            sums = own
        elif (source + 1) % link.size == link.rank:  # the first rank after the owner
            sums = [torch.zeros_like(x, dtype=dtype) for x in theirs]
        else:
            sums = _receive_sums([x.shape for x in theirs], dq, layer)
        whole = [_for_heads(x, queries) for x in theirs]
        for of_queries, rows, of_keys, columns in layer.blocks(source):
            block = gradients(
                queries[:, :, rows],
                whole[0][:, :, columns],
                whole[1][:, :, columns],
                of_queries,
                of_keys,
                layer.rule,
                Attended(attended.outputs[:, :, rows], attended.log_sums[:, :, rows]),
                doutputs[:, :, rows],
            )
            dq[:, :, rows] += block.queries
            for total, each in zip(sums, (block.keys, block.values), strict=True):
                total[:, :, columns] += _of_heads(each, total)
        if source != link.rank:
            to = (link.rank + 1) % link.size
            sent.append(link.start_send(sums, to, f"context.{layer.layer}.gradients", GRADIENTS))
    if link.size > 1:
        for total, each in zip(own, _receive_sums([x.shape for x in own], dq, layer), strict=True):
            total.add_(each)
    for handle in sent:
        link.wait(handle)
    return AttentionGradients(dq, *own)


def _receive_sums(
    shapes: Sequence[torch.Size], like: torch.Tensor, layer: RingLayer
) -> list[torch.Tensor]:
    """Receives sums of gradients of keys and values from the rank before."""
    link = layer.link
    source = (link.rank - 1) % link.size
    return link.start_recv(shapes, like, source, f"context.{layer.layer}.gradients", GRADIENTS)()


def _around(
    keys: torch.Tensor, values: torch.Tensor, layer: RingLayer, direction: str
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Yields each rank with its keys and values, this rank's first. While the caller computes with
    them, they are sent to the next rank, and others are received from the rank before."""
    link = layer.link
    name = f"context.{layer.layer}.{direction}"
    now = [keys, values]
    for step in range(link.size):
        source = (link.rank - step) % link.size
        if step == link.size - 1:
            yield source, now
            return
        handle = link.start_send(now, (link.rank + 1) % link.size, name)
        count = layer.positions.count((source - 1) % link.size)
        shapes = [(*x.shape[:2], count, x.shape[3]) for x in now]
        wait = link.start_recv(shapes, keys, (link.rank - 1) % link.size, name)
        yield source, now
        now = wait()
        link.wait(handle)


def _for_heads(x: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Repeats the heads of keys or values that several heads of queries share."""
    times = queries.shape[1] // x.shape[1]
    return x if times == 1 else x.repeat_interleave(times, 1)


def _of_heads(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Sums the gradients of repeated heads."""
    times = gradient.shape[1] // like.shape[1]
    return gradient if times == 1 else gradient.unflatten(1, (like.shape[1], times)).sum(2)
