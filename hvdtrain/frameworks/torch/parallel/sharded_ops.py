"""ShardedOps: the operations of a rule on parameters of which each rank has a part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hvdtrain.frameworks.torch.optim.ops import TorchOps
from hvdtrain.frameworks.torch.parallel.strategy import Shard

Total = Callable[[torch.Tensor], torch.Tensor]
Parts = list[torch.Tensor]  # (n,) of each parameter, what this rank has of an array of its shape; n may be 0
AT_ONCE = 8 << 20  # bytes of whole matrices


class ShardedOps(TorchOps):
    """A norm is one of all parts; a matrix whose parts are on several ranks is put together, and orthogonalized on one of them alone."""

    def __init__(self, shards: Mapping[Any, Shard], total: Total, rank: int, size: int) -> None:
        """shards: by their parameter; total: the sum over ranks, of which this is `rank` of `size`."""
        self._shards, self._total, self._rank, self._size = shards, total, rank, size
        self._cut: dict[tuple[Any, ...], list[bool]] = {}

    def norm(self, x: Parts) -> torch.Tensor:
        return self._total(super().norm(x).square()).sqrt()

    def orthogonalize(self, x: Parts, p: Parts, rounds: int, eps: float, dtype: str) -> Parts:
        shards, is_cut = [self._shards[q] for q in p], self._are_cut(p)
        found = [torch.empty_like(part) for part in x]
        own = [i for i, shard in enumerate(shards) if not is_cut[i] and shard.stop > shard.start]
        wholes = [x[i].view(shards[i].shape) for i in own]
        for i, result in zip(own, super().orthogonalize(wholes, wholes, rounds, eps, dtype), strict=True):
            found[i] = result.view(-1)
        for some in runs_of_bytes([i for i in range(len(x)) if is_cut[i]], shards, x[0].element_size()):
            shapes = [shards[i].shape for i in some]
            wholes = self._put_together(shapes, {k: (shards[i].start, x[i]) for k, i in enumerate(some)}, x[0])
            mine = range(self._rank, len(some), self._size)  # ranks take turns
            results = super().orthogonalize([wholes[k] for k in mine], wholes, rounds, eps, dtype)
            results = self._put_together(shapes, {k: (0, result.view(-1)) for k, result in zip(mine, results, strict=True)}, x[0])
            for i, result in zip(some, results, strict=True):
                found[i] = result.view(-1)[shards[i].start : shards[i].stop]
        return found

    def _are_cut(self, p: Parts) -> list[bool]:
        """For each parameter, whether a rank has only a part of it; the same on every rank."""
        key = tuple(p)
        if key not in self._cut:
            own = [0 < shard.stop - shard.start < math.prod(shard.shape) for shard in (self._shards[q] for q in p)]
            on_ranks = self._total(p[0].new_tensor(own)).tolist()
            self._cut[key] = [here or ranks > 0 for here, ranks in zip(own, on_ranks, strict=True)]  # ranks: unknown in a prediction
        return self._cut[key]

    def _put_together(self, shapes: Sequence[tuple[int, ...]], given: Mapping[int, tuple[int, torch.Tensor]], like: torch.Tensor) -> Parts:
        """Arrays of these shapes. given: of some of them, where this rank's elements begin, and those; every rank calls it."""
        sizes = [math.prod(shape) for shape in shapes]
        row = like.new_zeros(sum(sizes))
        for k, (start, part) in given.items():
            begin = sum(sizes[:k]) + start
            row[begin : begin + len(part)] = part
        return [array.view(shape) for array, shape in zip(self._total(row).split(sizes), shapes, strict=True)]


def runs_of_bytes(indices: Sequence[int], shards: Sequence[Shard], itemsize: int) -> Iterator[list[int]]:
    """Some of the indices at a time, in order, whose shards are of parameters of about AT_ONCE bytes together, or one larger one."""
    ends = itertools.accumulate(math.prod(shards[i].shape) * itemsize for i in indices)
    for _, run in itertools.groupby(zip(ends, indices, strict=True), lambda pair: pair[0] // AT_ONCE):
        yield [i for _, i in run]
