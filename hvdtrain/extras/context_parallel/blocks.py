"""Attention of some positions to others, and its gradient, with the logarithms of the sums by which
softmax divides. Blocks are merged by them, without a matrix of all scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

TILE = 1024  # positions: scores are computed for TILE x TILE positions at a time


class Attended(NamedTuple):
    """The outputs (n, heads, a, features) of `a` positions, and the logarithms of their sums of
    exponentials (n, heads, a): -inf for a position that attends to none."""

    outputs: torch.Tensor
    log_sums: torch.Tensor

    def merge(self, other: Attended) -> Attended:
        """Returns the attention to the keys of both, which are disjoint (Liu et al. 2023,
        arXiv:2310.01889, algorithm 1; Milakov and Gimelshein 2018, arXiv:1805.02867). This one
        has no log_sums of -inf."""
        log_sums = torch.logaddexp(self.log_sums, other.log_sums)
        mine = (self.log_sums - log_sums).exp().unsqueeze(-1)
        theirs = (other.log_sums - log_sums).exp().unsqueeze(-1)
        return Attended(mine * self.outputs + theirs * other.outputs, log_sums)


class AttentionGradients(NamedTuple):
    """Gradients of queries, keys and values."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class AttentionRule(NamedTuple):
    """Which keys a query attends to, and how: the same for all blocks of a layer."""

    causal: bool
    scale: float
    # int64 (n, positions of the sequence): a position attends to those with the same number
    segments: torch.Tensor | None = None
    dropout: float = 0.0
    seed: int = 0  # of the dropped weights, with the positions of a tile

    def skips(self, queries: range, keys: range) -> bool:
        """Whether no query attends to any of the keys."""
        nothing = not len(queries) or not len(keys)
        return nothing or (self.causal and keys.start >= queries.stop)

    def mask(self, queries: range, keys: range, device: torch.device) -> torch.Tensor | None:
        """Returns bool (n or 1, 1, queries, keys), true where a query attends to a key; None:
        everywhere."""
        mask = None
        if self.causal and keys.stop - 1 > queries.start:
            of_queries = torch.arange(queries.start, queries.stop, device=device)
            of_keys = torch.arange(keys.start, keys.stop, device=device)
            mask = (of_queries[:, None] >= of_keys)[None]  # (1, queries, keys)
        if self.segments is not None:
            same = (
                self.segments[:, queries.start : queries.stop, None]
                == self.segments[:, None, keys.start : keys.stop]
            )
            mask = same if mask is None else mask & same
        return None if mask is None else mask[:, None]

    def kept(self, queries: range, keys: range, like: torch.Tensor) -> torch.Tensor | None:
        """Returns the factors of dropout for the weights of a tile: 0 or 1 / (1 - dropout). The
        same in forward and backward; None without dropout."""
        if not self.dropout:
            return None
        generator = torch.Generator(like.device)
        tile = queries.start * 0x9E3779B97F4A7C15 + keys.start * 0xC2B2AE3D27D4EB4F
        generator.manual_seed((self.seed + tile) & (2**63 - 1))
        keep = torch.rand(like.shape, generator=generator, device=like.device) >= self.dropout
        return keep.to(like.dtype) / (1.0 - self.dropout)


def attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    of_queries: range,
    of_keys: range,
    rule: AttentionRule,
) -> Attended:
    """Computes the attention of queries (n, heads, a, e) at the positions of_queries to keys (n,
    heads, b, e) and values (n, heads, b, v) at of_keys. Results are at least float32."""
    if _is_plain(queries, values, of_queries, of_keys, rule):
        queries, keys, values = map(_by_rows, (queries, keys, values))
        outputs, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, _is_diagonal(of_queries, of_keys, rule), scale=rule.scale
        )
        return Attended(outputs.to(log_sums.dtype), log_sums)
    parts = [
        _attend_rows(queries[:, :, rows], keys, values, some, of_keys, rule)
        for rows, some in _tiles(of_queries)
    ]
    return Attended(*(torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)))


def _attend_rows(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    of_queries: range,
    of_keys: range,
    rule: AttentionRule,
) -> Attended:
    found: Attended | None = None
    for columns, some in reversed(list(_tiles(of_keys))):
        if rule.skips(of_queries, some):
            continue
        tile = _attend_tile(
            queries, keys[:, :, columns], values[:, :, columns], of_queries, some, rule
        )
        found = tile if found is None else _merge_any(found, tile)
    assert found is not None, (of_queries, of_keys)
    return found


def _merge_any(one: Attended, other: Attended) -> Attended:
    """Merges attention that may be empty for some positions in both."""
    log_sums = torch.logaddexp(one.log_sums, other.log_sums)
    safe = log_sums.masked_fill(log_sums.isneginf(), 0.0)
    first, second = ((each.log_sums - safe).exp().unsqueeze(-1) for each in (one, other))
    return Attended(first * one.outputs + second * other.outputs, log_sums)


def _attend_tile(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    of_queries: range,
    of_keys: range,
    rule: AttentionRule,
) -> Attended:
    scores = _scores(queries, keys, of_queries, of_keys, rule)
    largest = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    weights = (scores - largest).exp()
    sums = weights.sum(-1, keepdim=True)
    kept = rule.kept(of_queries, of_keys, weights)
    dropped = weights if kept is None else weights * kept
    outputs = dropped @ values.to(scores.dtype) / sums.clamp(min=torch.finfo(sums.dtype).tiny)
    return Attended(outputs, (largest + sums.log()).squeeze(-1))


def gradients(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    of_queries: range,
    of_keys: range,
    rule: AttentionRule,
    attended: Attended,
    doutputs: torch.Tensor,
) -> AttentionGradients:
    """Computes the gradients of one block.

    attended: of the queries, with all keys that they attend to, not only those of this block;
    doutputs: the gradient of its outputs. The weights of the block are exp(scores - log_sums)
    (Dao et al. 2022, arXiv:2205.14135, algorithm 4).
    """
    if _is_plain(queries, values, of_queries, of_keys, rule):
        dtype = queries.dtype
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _by_rows(doutputs.to(dtype)),
            _by_rows(queries),
            _by_rows(keys),
            _by_rows(values),
            _by_rows(attended.outputs.to(dtype)),
            attended.log_sums,
            0.0,
            _is_diagonal(of_queries, of_keys, rule),
            scale=rule.scale,
        )
        return AttentionGradients(*found)
    dtype = attended.log_sums.dtype
    sums = [torch.zeros_like(x, dtype=dtype) for x in (queries, keys, values)]
    dq, dk, dv = sums
    products = (doutputs.to(dtype) * attended.outputs.to(dtype)).sum(-1, keepdim=True)
    for rows, some in _tiles(of_queries):
        dout = doutputs[:, :, rows].to(dtype)
        for columns, others in _tiles(of_keys):
            if rule.skips(some, others):
                continue
            scores = _scores(queries[:, :, rows], keys[:, :, columns], some, others, rule)
            weights = (scores - attended.log_sums[:, :, rows].unsqueeze(-1)).exp()
            dweights = dout @ values[:, :, columns].to(dtype).transpose(2, 3)
            kept = rule.kept(some, others, weights)
            dropped = weights if kept is None else weights * kept
            dweights = dweights if kept is None else dweights * kept
            dv[:, :, columns] += dropped.transpose(2, 3) @ dout
            dscores = weights * (dweights - products[:, :, rows]) * rule.scale
            dq[:, :, rows] += dscores @ keys[:, :, columns].to(dtype)
            dk[:, :, columns] += dscores.transpose(2, 3) @ queries[:, :, rows].to(dtype)
    return AttentionGradients(dq, dk, dv)


def _scores(
    queries: torch.Tensor,
    keys: torch.Tensor,
    of_queries: range,
    of_keys: range,
    rule: AttentionRule,
) -> torch.Tensor:
    """(n, heads, a, b), at least float32; -inf where a query does not attend to a key"""
    dtype = torch.promote_types(queries.dtype, torch.float32)
    scores = queries.to(dtype) @ keys.to(dtype).transpose(2, 3) * rule.scale
    mask = rule.mask(of_queries, of_keys, queries.device)
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _is_plain(
    queries: torch.Tensor,
    values: torch.Tensor,
    of_queries: range,
    of_keys: range,
    rule: AttentionRule,
) -> bool:
    """Whether torch's flash attention for the CPU computes this block. It needs no mask: the block
    lies on the diagonal, or before it. Values have as many features as queries."""
    if queries.device.type != "cpu" or rule.segments is not None or rule.dropout:
        return False
    if queries.shape[-1] != values.shape[-1]:
        return False
    is_whole = not rule.causal or of_keys.stop <= of_queries.start + 1
    return is_whole or _is_diagonal(of_queries, of_keys, rule)


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    """Returns x with the features of a position beside each other in memory. torch's flash
    attention reads them so whatever the strides are, and returns wrong numbers otherwise."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _is_diagonal(of_queries: range, of_keys: range, rule: AttentionRule) -> bool:
    return rule.causal and of_queries == of_keys and len(of_keys) > 1


def _tiles(positions: range) -> Iterator[tuple[slice, range]]:
    """Yields the rows of each tile, and their positions."""
    for start in range(0, len(positions), TILE):
        rows = slice(start, min(start + TILE, len(positions)))
        yield rows, positions[rows]
