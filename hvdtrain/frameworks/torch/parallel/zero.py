"""shard.stage=1 and 2: each rank has the optimizer state of its part of every bucket, and updates that part alone (ZeRO).

Source: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from typing import Any, Literal

import torch

from hvdtrain.comm.communicator import Communicator, Handle, part_of
from hvdtrain.comm.mesh import Mesh
from hvdtrain.core.metrics import Sums, add_sums
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.optim.rule_optimizer import RuleOptimizer
from hvdtrain.frameworks.torch.parallel.buckets import InOrder, group
from hvdtrain.frameworks.torch.parallel.sharded_ops import ShardedOps, Total
from hvdtrain.frameworks.torch.parallel.strategy import (
    Held,
    NamedParameters,
    OnePass,
    Shard,
    Strategy,
    Wrapped,
    reduction_device,
)


class Zero(Strategy):
    """Flat buckets of weights, from the last layer to the first, each cut into one part for each rank.

    A gradient is copied into a buffer of its bucket as soon as backward has computed it, and freed; each rank gets the sum over ranks of
    its own part, to which it applies the optimizer, and the updated parts reach all ranks. Stage 1 adds up the gradients of micro-batches
    first, so that each rank holds whole gradients meanwhile; stage 2 reduces those of each micro-batch and adds up the parts.

    With P bytes of weights and N ranks, Adam takes 2 P + 2 P / N in stage 1 and P + 3 P / N in stage 2, and one or two buckets, where
    every rank with everything takes 4 P. Weights lie in memory in the order of their indices, also those of convolutions.

    Where a mesh has replicas, parts are those of its ranks of `shard`, and their sums are added up over its ranks of `replicas`.
    """

    def __init__(
        self, named: NamedParameters, mesh: Mesh, stage: Literal[1, 2], bucket_bytes: int, stopwatch: Stopwatch, on_host: bool
    ) -> None:
        self._mesh, self._stage, self._stopwatch = mesh, stage, stopwatch
        self._buffers = _Buffers()
        self._buckets = [
            _Bucket(parameters, f"gradient.{i}", mesh, self._buffers, on_host) for i, parameters in enumerate(group(named, bucket_bytes))
        ]
        self._order = InOrder(self._buckets, _Bucket.start, stopwatch)
        self._shards = self._find_shards()
        self.summary = f"optimizer state{' and gradients' * (stage == 2)} sharded over {shard_summary(mesh)} (ZeRO stage {stage})"

    @property
    def equal_ranks(self) -> int:
        return self._mesh.world.size

    def _find_shards(self) -> dict[torch.nn.Parameter, Shard]:
        return {shard.whole: shard for bucket in self._buckets for shard in bucket.shards}

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        self._of_wholes = optimizer
        return Wrapped(forward, of_shards(optimizer, self._shards, self.total, self._mesh.shard.rank, self._mesh.shard.size))

    def divide_anew(self) -> torch.optim.Optimizer:
        self._order.cut_off()
        self._buffers.forget()
        for bucket in self._buckets:
            bucket.divide()
        self._shards = self._find_shards()
        return of_shards(self._of_wholes, self._shards, self.total, self._mesh.shard.rank, self._mesh.shard.size)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return total_over(self._mesh.shard, x)

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        total: Sums = {}
        for bucket in self._buckets:
            bucket.forget()
        for number, batch in enumerate(micro, start=1):
            is_last = number == len(micro)
            reduces = is_last or self._stage == 2
            if reduces:
                self._order.begin()
            total = add_sums(total, one_pass(batch, divisor, is_last))
            if reduces:
                self._order.end()
                if self._mesh.replicas.size > 1:
                    self.reduce()  # now: a rank with another order of backward would take up the next reductions in another order
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
        for spread in [bucket.start_spread() for bucket in self._buckets]:
            spread()
        self._stopwatch.enter("update")

    def put_together(
        self, of: Callable[[torch.nn.Parameter], torch.Tensor], trained: Sequence[torch.nn.Parameter]
    ) -> dict[torch.nn.Parameter, torch.Tensor]:
        return {p: whole for bucket in self._buckets for p, whole in bucket.put_together(of).items()}

    def held(self) -> Held:
        return Held([bucket.gradient for bucket in self._buckets], self._buffers.free)


class _Buffers:
    """Memory for the gradients of buckets that wait for their reduction or are being reduced."""

    most_reduced = 2  # at the same time

    def __init__(self) -> None:
        self.free: list[torch.Tensor] = []
        self._reduced: list[_Bucket] = []  # the oldest first

    def take(self, length: int, like: torch.Tensor) -> torch.Tensor:
        """(length,), with any numbers in it."""
        for i, memory in enumerate(self.free):
            if len(memory) >= length and memory.dtype == like.dtype:
                return self.free.pop(i)[:length]
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def give_back(self, memory: torch.Tensor) -> None:
        whole = memory if memory._base is None else memory._base
        self.free = [*self.free, whole][-self.most_reduced :]

    def is_reduced(self, bucket: _Bucket) -> None:
        """Waits for the oldest reductions, where there are more."""
        self._reduced.append(bucket)
        while len(self._reduced) > self.most_reduced:
            self._reduced[0].finish()

    def is_finished(self, bucket: _Bucket) -> None:
        self._reduced.remove(bucket)

    def forget(self) -> None:
        """The reductions of a step that was cut off."""
        self._reduced = []


class _Bucket:
    """Some parameters, whose weights lie in one flat tensor; this rank's part of it, and of the gradient."""

    def __init__(self, parameters: list[torch.nn.Parameter], name: str, mesh: Mesh, buffers: _Buffers, on_host: bool) -> None:
        self.parameters, self.name = parameters, name
        self._mesh, self._buffers, self._on_host = mesh, buffers, on_host
        sizes = [p.numel() for p in parameters]
        with torch.no_grad():
            self._weights = torch.cat([p.detach().reshape(-1) for p in parameters])
        self._device = reduction_device(self._weights.device, mesh.world)
        self._begins = dict(zip(parameters, [sum(sizes[:i]) for i in range(len(sizes))], strict=True))
        self.divide()

    def divide(self) -> None:
        """Takes this rank's part, by the ranks that there are now; what a step that was cut off has left is void."""
        self._own = part_of(len(self._weights), self._mesh.shard.rank, self._mesh.shard.size)
        self._updated = self._weights[self._own]  # what the optimizer updates: the weights themselves, or a copy in host memory
        self._updated = self._updated.to("cpu") if self._on_host else self._updated
        self._sum = torch.zeros_like(self._updated)
        self._sums = 0  # reductions that it has
        self._handle: Handle | None = None
        self._buffer: torch.Tensor | None = None
        self._taken: set[torch.nn.Parameter] = set()
        self.shards = [self._shard(p) for p in self.parameters]
        for p in self.parameters:
            p.grad = None

    @property
    def gradient(self) -> torch.Tensor:
        """This rank's part."""
        return self._sum

    def _shard(self, p: torch.nn.Parameter) -> Shard:
        begin, n = self._begins[p], p.numel()
        p.data = self._weights[begin : begin + n].view(p.shape)
        start = min(max(self._own.start - begin, 0), n)
        stop = min(max(self._own.stop - begin, start), n)
        first = begin + start - self._own.start if stop > start else 0
        return Shard(torch.nn.Parameter(self._updated[first : first + stop - start]), p, start, stop)

    def forget(self) -> None:
        """The gradient of the step before."""
        self._sums = 0

    def take(self, p: torch.nn.Parameter) -> None:
        """Copies p.grad into the buffer, and frees it; zeros where there is none."""
        self.finish()  # of the micro-batch before
        if self._buffer is None:
            self._buffer = self._buffers.take(len(self._weights), self._weights)
        begin = self._begins[p]
        view = self._buffer[begin : begin + p.numel()]
        if p.grad is None:
            view.zero_()
        else:
            view.view(p.shape).copy_(p.grad)
        p.grad = None
        self._taken.add(p)

    def start(self) -> None:
        """Starts the reduction."""
        for p in self.parameters:
            if p not in self._taken:
                self.take(p)
        self._taken = set()
        assert self._buffer is not None
        self._handle = self._mesh.shard.start_reduce_scatter(self._buffer.to(self._device), self.name)
        self._buffers.is_reduced(self)

    def finish(self) -> None:
        """Waits for a reduction that is under way; then each shard has this rank's part of the gradient so far."""
        if self._handle is None:
            return
        part = self._handle.wait()
        if self._mesh.replicas.size > 1:
            part = self._mesh.replicas.allreduce(part, f"{self.name}.replicas")
        part = part.to(self._sum.device)
        self._handle = None
        self._sum = self._sum.copy_(part) if self._sums == 0 else self._sum.add_(part)
        self._sums += 1
        assert self._buffer is not None
        self._buffers.give_back(self._buffer)
        self._buffer = None
        self._buffers.is_finished(self)
        for shard in self.shards:
            begin = self._begins[shard.whole] + shard.start - self._own.start
            shard.parameter.grad = self._sum[begin : begin + shard.parameter.numel()] if shard.parameter.numel() else self._sum[:0]

    @torch.no_grad()
    def copy_weights(self) -> None:
        """What the optimizer updates becomes the weights."""
        if self._updated.device != self._weights.device:
            self._updated.copy_(self._weights[self._own])

    @torch.no_grad()
    def start_spread(self) -> Callable[[], None]:
        """Starts to send the weights of each rank's part to all; the result waits for that."""
        if self._updated.device != self._weights.device:
            self._weights[self._own].copy_(self._updated)
        handle = self._mesh.shard.start_spread(self._weights.to(self._device), f"weights.{self.name}")

        def wait() -> None:
            weights = handle.wait()
            if weights is not self._weights:
                self._weights.copy_(weights)

        return wait

    @torch.no_grad()
    def put_together(self, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[torch.nn.Parameter, torch.Tensor]:
        """Puts parts together: Zero.put_together()."""
        row = torch.empty_like(self._weights)
        for shard in self.shards:
            begin = self._begins[shard.whole] + shard.start
            row[begin : begin + shard.parameter.numel()].copy_(of(shard.parameter))
        row = self._mesh.shard.start_spread(row.to(self._device), f"averages.{self.name}").wait().to(row.device)
        sizes = [p.numel() for p in self.parameters]
        return {p: part.view(p.shape) for p, part in zip(self.parameters, row.split(sizes), strict=True)}


def total_over(shard: Communicator, x: torch.Tensor) -> torch.Tensor:
    """A total as Strategy.total() has it, over the ranks that have parts."""
    return shard.allreduce(x.to(reduction_device(x.device, shard)), f"shards.{x.dtype}.{x.numel()}").to(x.device)


def shard_summary(mesh: Mesh) -> str:
    """ "4 ranks", or "4 ranks of each of 2 hosts" """
    return f"{mesh.shard.size} rank{'s' * (mesh.shard.size > 1)}" + f" of each of {len(mesh.table)} hosts" * (len(mesh.table) > 1)


def of_shards(
    optimizer: torch.optim.Optimizer, shards: dict[torch.nn.Parameter, Shard], total: Total, rank: int = 0, size: int = 1
) -> torch.optim.Optimizer:
    """This optimizer, without state, for the shards in the place of the parameters.

    rank, size: of the ranks over which total() adds up, for rules that need whole matrices; others do without
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
    nbytes = {shard.parameter: math.prod(shard.shape) * shard.whole.element_size() for shard in shards.values()}
    sharded.ops = ShardedOps({shard.parameter: shard for shard in shards.values()}, total, rank, size)
    sharded.bytes_of = nbytes.__getitem__
    return sharded
