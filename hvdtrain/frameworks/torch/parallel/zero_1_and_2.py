"""shard.stage=1 and 2 (ZeRO): each rank has the optimizer state of its part of every bucket, and
updates only that part.

Source: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

import torch

from hvdtrain.comm.communicator import Communicator, Handle, part_of
from hvdtrain.comm.mesh import Mesh
from hvdtrain.core.metrics import Sums, add_sums
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.optim.rule_optimizer import RuleOptimizer, TorchOps
from hvdtrain.frameworks.torch.parallel.buckets import Bucket, InOrder, group
from hvdtrain.frameworks.torch.strategy import (
    NamedParameters,
    OnePass,
    Shard,
    Strategy,
    StrategyMemory,
    Wrapped,
    reduction_device,
)


class ZeroStrategy(Strategy):
    """Flat buckets of weights, from the last layer to the first, each cut into one part for each
    rank.

    As soon as backward has computed a gradient, it is copied into its bucket's buffer and freed.
    Each rank gets the sum over ranks of its own part and applies the optimizer to it. Then all
    ranks get the updated parts. Stage 1 first adds up the gradients of micro-batches, so each rank
    holds whole gradients meanwhile. Stage 2 reduces the gradients of each micro-batch and adds up
    the parts.

    With P bytes of weights and N ranks, Adam takes 2 P + 2 P / N in stage 1 and P + 3 P / N in
    stage 2, plus one or two buckets; without sharding it takes 4 P. Weights, also of convolutions,
    lie in memory in the order of their indices.

    If a mesh has replicas, its `shard` ranks have the parts, and the sums are added up over its
    `replicas` ranks.
    """

    def __init__(
        self,
        named: NamedParameters,
        mesh: Mesh,
        stage: Literal[1, 2],
        bucket_bytes: int,
        stopwatch: Stopwatch,
        on_host: bool,
        prefix: str = "",
    ) -> None:
        """prefix: begins the names of collectives."""
        self._mesh = mesh
        self._stage = stage
        self._stopwatch = stopwatch
        self._buffers = _Buffers()
        self._buckets = [
            _ShardedBucket(parameters, f"{prefix}gradient.{i}", mesh, self._buffers, on_host)
            for i, parameters in enumerate(group(named, bucket_bytes))
        ]
        self._order = InOrder(self._buckets, _ShardedBucket.start, stopwatch)
        self._shards = self._find_shards()
        self.summary = (
            f"optimizer state{' and gradients' if stage == 2 else ''} sharded over "
            f"{shard_summary(mesh)} (ZeRO stage {stage})"
        )

    @property
    def equal_ranks(self) -> int:
        return self._mesh.world.size

    def _find_shards(self) -> dict[torch.nn.Parameter, Shard]:
        return {shard.whole: shard for bucket in self._buckets for shard in bucket.shards}

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        self._of_wholes = optimizer
        return Wrapped(
            forward,
            of_shards(
                optimizer, self._shards, self.total, self._mesh.shard.rank, self._mesh.shard.size
            ),
        )

    def divide_anew(self, mesh: Mesh) -> torch.optim.Optimizer:
        self._mesh = mesh
        self._order.cut_off()
        self._buffers.forget()
        for bucket in self._buckets:
            bucket.divide(mesh)
        self._shards = self._find_shards()
        return of_shards(
            self._of_wholes, self._shards, self.total, self._mesh.shard.rank, self._mesh.shard.size
        )

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return total_over(self._mesh.shard, x)

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        total: Sums = {}
        for bucket in self._buckets:
            bucket.begin_step()
        for number, batch in enumerate(micro, start=1):
            is_last = number == len(micro)
            reduces = is_last or self._stage == 2
            if reduces:
                self._order.begin()
            total = add_sums(total, one_pass(batch, divisor, is_last))
            if reduces:
                self._order.end()
                if self._mesh.replicas.size > 1:
                    # now: if backward has another order on a rank, its next reductions would
                    # start in another order
                    self.reduce()
        return total

    def reduce(self) -> None:
        for bucket in self._buckets:
            bucket.finish()

    def weights_changed(self) -> None:
        for bucket in self._buckets:
            bucket.copy_weights()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._stopwatch.enter("communication")
        # docs/design.md says why the next forward pass does not overlap with this
        for spread in [bucket.start_spread() for bucket in self._buckets]:
            spread()
        self._stopwatch.enter("update")

    def put_together(
        self,
        of: Callable[[torch.nn.Parameter], torch.Tensor],
        trained: Sequence[torch.nn.Parameter],
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        return {
            p: whole for bucket in self._buckets for p, whole in bucket.put_together(of).items()
        }

    def held(self) -> StrategyMemory:
        return StrategyMemory([bucket.gradient for bucket in self._buckets], self._buffers.free)


class _Buffers:
    """Memory for the gradients of buckets that wait for their reduction or are being reduced."""

    most_reduced = 2  # at the same time

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self._reduced: list[_ShardedBucket] = []  # the oldest first

    def take(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """Allocates (length,), uninitialized."""
        for i, memory in enumerate(self.free):
            if len(memory) >= length and memory.dtype == like.dtype:
                return self.free.pop(i)[:length]
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def give_back(self, memory: torch.Tensor) -> None:
        whole = memory if memory._base is None else memory._base
        self.free = [*self.free, whole][-self.most_reduced :]

    def is_reduced(self, bucket: _ShardedBucket) -> None:
        """Waits for the oldest reductions if there are too many."""
        self._reduced.append(bucket)
        while len(self._reduced) > self.most_reduced:
            self._reduced[0].finish()

    def is_finished(self, bucket: _ShardedBucket) -> None:
        self._reduced.remove(bucket)

    def forget(self) -> None:
        """Discards the reductions of an interrupted step."""
        self._reduced = []


class _ShardedBucket(Bucket):
    """Some parameters with their weights in one flat tensor, and this rank's part of weights and
    gradient."""

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        name: str,
        mesh: Mesh,
        buffers: _Buffers,
        on_host: bool,
    ) -> None:
        super().__init__(parameters)
        self.name = name
        self._buffers = buffers
        self._on_host = on_host
        with torch.no_grad():
            self._weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        self._device = reduction_device(self._weights.device, mesh.world)
        self.divide(mesh)

    def divide(self, mesh: Mesh) -> None:
        """Takes this rank's part among the current ranks; discards the rest of an interrupted
        step."""
        self._mesh = mesh
        self._own = part_of(len(self._weights), self._mesh.shard.rank, self._mesh.shard.size)
        # what the optimizer updates: the weights themselves, or a copy in host memory
        self._updated = self._weights[self._own]
        self._updated = self._updated.to("cpu") if self._on_host else self._updated
        self._sum = torch.zeros_like(self._updated)
        self._sums = 0  # reductions that it has
        self._handle: Handle | None = None
        self._buffer: torch.Tensor | None = None
        self.forget()
        self.shards = [self._shard(p) for p in self.parameters]
        for p in self.parameters:
            p.grad = None

    @property
    def gradient(self) -> torch.Tensor:
        """Returns this rank's part of the gradient."""
        return self._sum

    def _shard(self, p: torch.nn.Parameter) -> Shard:
        begin = self._begins[p]
        n = p.numel()
        p.data = self._weights[begin : begin + n].view(p.shape)
        start = min(max(self._own.start - begin, 0), n)
        stop = min(max(self._own.stop - begin, start), n)
        first = begin + start - self._own.start if stop > start else 0
        return Shard(
            torch.nn.Parameter(self._updated[first : first + stop - start]), p, start, stop
        )

    def begin_step(self) -> None:
        """Discards the gradient of the previous step."""
        self._sums = 0

    def empty(self) -> torch.Tensor:
        self.finish()  # the previous micro-batch's
        if self._buffer is None:
            self._buffer = self._buffers.take(len(self._weights), self._weights)
        return self._buffer

    def start(self) -> None:
        """Starts the reduction."""
        self.fill()
        assert self._buffer is not None
        self._handle = self._mesh.shard.start_reduce_scatter(
            self._buffer.to(self._device), self.name
        )
        self._buffers.is_reduced(self)

    def finish(self) -> None:
        """Waits for a reduction that is under way; then each shard has this rank's part of the
        gradient so far."""
        if self._handle is None:
            return
        part = self._handle.wait()
        if self._mesh.replicas.size > 1:
            part = self._mesh.replicas.allreduce(part, f"{self.name}.replicas")
        self._handle = None
        self._sum = (
            self._sum.copy_(part) if self._sums == 0 else self._sum.add_(part.to(self._sum.device))
        )
        self._sums += 1
        assert self._buffer is not None
        self._buffers.give_back(self._buffer)
        self._buffer = None
        self._buffers.is_finished(self)
        for shard in self.shards:
            begin = self._begins[shard.whole] + shard.start - self._own.start
            shard.parameter.grad = (
                self._sum[begin : begin + shard.parameter.numel()]
                if shard.parameter.numel()
                else self._sum[:0]
            )

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Copies the updated parts into the weights."""
        if self._updated.device != self._weights.device:
            self._updated.copy_(self._weights[self._own])

    @torch.no_grad()
    def start_spread(self) -> Callable[[], None]:
        """Starts to send the weights of each rank's part to all; the result waits for that."""
        if self._updated.device != self._weights.device:
            self._weights[self._own].copy_(self._updated)
        handle = self._mesh.shard.start_spread(
            self._weights.to(self._device), f"weights.{self.name}"
        )

        def wait() -> None:
            weights = handle.wait()
            if weights is not self._weights:
                self._weights.copy_(weights)

        return wait

    @torch.no_grad()
    def put_together(
        self, of: Callable[[torch.nn.Parameter], torch.Tensor]
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Puts parts together: ZeroStrategy.put_together()."""
        row = torch.empty_like(self._weights)
        for shard in self.shards:
            begin = self._begins[shard.whole] + shard.start
            row[begin : begin + shard.parameter.numel()].copy_(of(shard.parameter))
        row = (
            self._mesh.shard.start_spread(row.to(self._device), f"averages.{self.name}")
            .wait()
            .to(row.device)
        )
        sizes = [p.numel() for p in self.parameters]
        return {
            p: part.view(p.shape) for p, part in zip(self.parameters, row.split(sizes), strict=True)
        }


def total_over(shard: Communicator, x: torch.Tensor) -> torch.Tensor:
    """Implements Strategy.total() over the ranks that have parts."""
    return shard.allreduce(
        x.to(reduction_device(x.device, shard)), f"shards.{x.dtype}.{x.numel()}"
    ).to(x.device)


def shard_summary(mesh: Mesh) -> str:
    """Returns "4 ranks", or "4 ranks of each of 2 hosts"."""
    return (
        f"{mesh.shard.size} rank{'s' if mesh.shard.size > 1 else ''}"
        + f" of each of {len(mesh.table)} hosts" * (len(mesh.table) > 1)
    )


def of_shards(
    optimizer: torch.optim.Optimizer,
    shards: dict[torch.nn.Parameter, Shard],
    total: Total,
    rank: int = 0,
    size: int = 1,
) -> torch.optim.Optimizer:
    """Returns a copy of this optimizer, without state, that updates the shards instead of the
    parameters.

    rank, size: this rank among the ranks over which total() sums; only rules that need whole
    matrices use them
    """
    groups: list[dict[str, Any]] = []
    for of_all in optimizer.param_groups:
        groups.append({key: value for key, value in of_all.items() if key != "params"})
        groups[-1]["params"] = [shards[p].parameter for p in of_all["params"]]
    construction = groups[0].get("construction")
    if construction:
        return construction.constructor(groups, **construction.arguments)
    assert isinstance(optimizer, RuleOptimizer)
    sharded = type(optimizer)(groups)
    nbytes = {
        shard.parameter: math.prod(shard.shape) * shard.whole.element_size()
        for shard in shards.values()
    }
    sharded.ops = ShardedOps(
        {shard.parameter: shard for shard in shards.values()}, total, rank, size
    )
    sharded.bytes_of = nbytes.__getitem__
    return sharded


Total = Callable[[torch.Tensor], torch.Tensor]
# for each parameter (n,), this rank's elements of an array of its shape; n may be 0
Parts = list[torch.Tensor]
AT_ONCE = 8 << 20  # bytes of whole matrices


class ShardedOps(TorchOps):
    """Rule operations on shards: norms include all parts; a matrix with parts on several ranks is
    gathered and orthogonalized on one of them."""

    def __init__(self, shards: Mapping[Any, Shard], total: Total, rank: int, size: int) -> None:
        """shards: by their parameter; total: sums over `size` ranks; this rank is number `rank`."""
        self._shards = shards
        self._total = total
        self._rank = rank
        self._size = size
        self._cut: dict[tuple[Any, ...], list[bool]] = {}

    def norm(self, x: Parts) -> torch.Tensor:
        return self._total(super().norm(x).square()).sqrt()

    def orthogonalize(self, x: Parts, p: Parts, rounds: int, eps: float, dtype: str) -> Parts:
        shards = [self._shards[q] for q in p]
        is_cut = self._are_cut(p)
        orthogonal = [torch.empty_like(part) for part in x]
        own = [i for i, shard in enumerate(shards) if not is_cut[i] and shard.stop > shard.start]
        wholes = [x[i].view(shards[i].shape) for i in own]
        for i, result in zip(
            own, super().orthogonalize(wholes, wholes, rounds, eps, dtype), strict=True
        ):
            orthogonal[i] = result.view(-1)
        for some in runs_of_bytes(
            [i for i in range(len(x)) if is_cut[i]], shards, x[0].element_size()
        ):
            shapes = [shards[i].shape for i in some]
            wholes = self._put_together(
                shapes, {k: (shards[i].start, x[i]) for k, i in enumerate(some)}, x[0]
            )
            mine = range(self._rank, len(some), self._size)  # ranks take turns
            results = super().orthogonalize([wholes[k] for k in mine], wholes, rounds, eps, dtype)
            results = self._put_together(
                shapes,
                {k: (0, result.view(-1)) for k, result in zip(mine, results, strict=True)},
                x[0],
            )
            for i, result in zip(some, results, strict=True):
                orthogonal[i] = result.view(-1)[shards[i].start : shards[i].stop]
        return orthogonal

    def _are_cut(self, p: Parts) -> list[bool]:
        """Whether a rank has only a part of each parameter; the same on every rank."""
        key = tuple(p)
        if key not in self._cut:
            own = [
                0 < shard.stop - shard.start < math.prod(shard.shape)
                for shard in (self._shards[q] for q in p)
            ]
            on_ranks = self._total(p[0].new_tensor(own)).tolist()
            # a prediction does not know `ranks`, only this rank's own value
            self._cut[key] = [here or ranks > 0 for here, ranks in zip(own, on_ranks, strict=True)]
        return self._cut[key]

    def _put_together(
        self,
        shapes: Sequence[tuple[int, ...]],
        given: Mapping[int, tuple[int, torch.Tensor]],
        like: torch.Tensor,
    ) -> Parts:
        """Returns arrays of these shapes. Every rank calls it. given: for some arrays, the index of
        this rank's first element, and its elements."""
        sizes = [math.prod(shape) for shape in shapes]
        row = like.new_zeros(sum(sizes))
        for k, (start, part) in given.items():
            begin = sum(sizes[:k]) + start
            row[begin : begin + len(part)] = part
        return [
            array.view(shape)
            for array, shape in zip(self._total(row).split(sizes), shapes, strict=True)
        ]


def runs_of_bytes(
    indices: Sequence[int], shards: Sequence[Shard], itemsize: int
) -> Iterator[list[int]]:
    """Yields groups of the indices, in order: the parameters of a group's shards have about AT_ONCE
    bytes together, or a group is one larger parameter."""
    ends = itertools.accumulate(math.prod(shards[i].shape) * itemsize for i in indices)
    for _, run in itertools.groupby(
        zip(ends, indices, strict=True), lambda pair: pair[0] // AT_ONCE
    ):
        yield [i for _, i in run]
