"""Divided: the strategy of ranks that share one model. It wraps the strategy that reduces gradients
over data-parallel ranks.

Each element of the training state has one owner among the ranks of a model. It is the rank with
that part of a parameter, or the first rank for a parameter on several ranks (a norm, a position
embedding, a weight of two pipeline stages). Only the owner updates it, and sends the new weights to
the others. So norms over parameters count everything once, and the copies of a weight are
bit-identical. A rank has 0 elements of a parameter of another stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Sized
from typing import Protocol

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.staging import KINDS
from hvdtrain.core.arrays import WHOLE, Cut
from hvdtrain.core.metrics import Sums
from hvdtrain.frameworks.torch.parallel.zero_1_and_2 import of_shards, total_over
from hvdtrain.frameworks.torch.strategy import (
    Around,
    OnePass,
    Shard,
    Strategy,
    Wrapped,
    reduction_device,
)


class Stages(Protocol):
    """The pipeline stages of a rank (pipeline/pipelined.py)."""

    summary: str

    def updates(self, p: torch.nn.Parameter) -> bool:
        """Whether this rank is the first that has the parameter."""

    def free_absent(
        self, cuts: Mapping[torch.nn.Parameter, Cut]
    ) -> dict[torch.nn.Parameter, Shard]:
        """Frees the parameters that this rank does not have, and returns empty shards for them."""

    def add_tied(self) -> None:
        """Sums the gradients of copies of a parameter. A collective."""

    def send_tied(self) -> None:
        """Copies the updated weights to the other copies. A collective."""


class Divided(Around):
    """`within` reduces the gradients of the parameters that this rank's stage updates over
    mesh.data."""

    def __init__(
        self,
        within: Strategy,
        mesh: Mesh,
        parameters: Sequence[torch.nn.Parameter],
        cuts: Mapping[torch.nn.Parameter, Cut],
        stages: Stages | None = None,
        sequence: bool = False,
    ) -> None:
        """cuts: of parameters that are partitioned over a tensor group; others are replicated on
        its ranks. stages: for parallel.pipeline; parameters of other stages lose their memory.
        sequence: a rank's gradients of replicated parameters come only from its positions.
        """
        super().__init__(within)
        self._mesh = mesh
        self._cuts = cuts
        self._stages = stages
        self._of_stage = {p for p in parameters if stages is None or stages.updates(p)}
        self._absent = stages.free_absent(cuts) if stages else {}
        self._shards = {p: self._owned(p) for p in parameters}
        self.calls_model = within.calls_model and stages is None
        self.gathers_in_passes = within.gathers_in_passes
        self._copied = [
            p for p in parameters if p in self._of_stage and p not in cuts and mesh.tensor.size > 1
        ]
        self._summed = (
            [p for p in parameters if p not in cuts] if sequence and mesh.tensor.size > 1 else []
        )
        # communicators.py
        self.waits_in_passes = within.waits_in_passes or (
            mesh.tensor.size > 1 and any(p.device.type in KINDS for p in parameters)
        )
        of_stages = f"{stages.summary}, " if stages else ""
        self.summary = (
            f"{mesh.summary()} ranks, "
            f"{'with parts of the positions, ' * bool(self._summed)}{of_stages}{within.summary}"
        )

    @property
    def equal_ranks(self) -> int:
        return self._mesh.world.size

    def _updates(self, p: torch.nn.Parameter) -> bool:
        return p in self._of_stage and (p in self._cuts or self._mesh.tensor.rank == 0)

    def _owned(self, p: torch.nn.Parameter) -> Shard:
        if p in self._absent:
            return self._absent[p]
        cut = self._cuts.get(p, WHOLE)
        if not self._updates(p):
            like = self._within.shard(p).parameter if p in self._of_stage else p
            return Shard(torch.nn.Parameter(like.detach().reshape(-1)[:0].clone()), p, 0, 0, cut)
        found = self._within.shard(p)
        if p in self._cuts:
            found = found._replace(cut=cut)
        is_everywhere = (
            found.is_everywhere
            and self._mesh.pipe.size == 1
            and (p in self._cuts or self._mesh.tensor.size == 1)
        )
        return found._replace(is_everywhere=is_everywhere)

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def part(self, p: torch.nn.Parameter) -> Shard:
        if p in self._absent:
            return self._absent[p]
        found = self._within.part(p)
        is_first = p in self._cuts or self._mesh.tensor.rank == 0
        if found.is_whole:  # on all ranks of mesh.data
            is_first = is_first and self._mesh.data.rank == 0
        if self._stages:
            is_first = is_first and self._stages.updates(p)
            found = found._replace(is_everywhere=False)
        return found._replace(cut=self._cuts.get(p, found.cut), is_mine=found.is_mine and is_first)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return total_over(self._mesh.parts, x)

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        if self._stages is None:  # with a pipeline, its passes call stages
            forward = self._within.wrap(forward, optimizer).forward
        return Wrapped(forward, of_shards(optimizer, self._shards, self.total))

    def run(self, micro: Sequence[Sized], divisor: float, one_pass: OnePass) -> Sums:
        if self._stages is None:
            return self._within.run(micro, divisor, one_pass)
        # all passes at once, because gradients of weights may come late and without torch's hooks
        sums = one_pass(micro, divisor, True)
        self._stages.add_tied()
        self._within.run([()], divisor, lambda *_: {})  # without a pass: only reduces p.grad
        return sums

    def reduce(self) -> None:
        self._within.reduce()
        if self._summed:
            self._sum_positions()
        for p, shard in self._shards.items():
            if not self._updates(p):
                p.grad = None
                if p in self._of_stage:
                    self._within.shard(p).parameter.grad = None
                shard.parameter.grad = torch.zeros_like(shard.parameter)

    @torch.no_grad()
    def _sum_positions(self) -> None:
        """Sums the gradients of replicated parameters over the ranks of a tensor group, in one
        allreduce of all ranks.

        All ranks take part, because ranks of a group may have different elements of a parameter
        (with parts of unequal lengths, buckets differ), and so that copies on ranks of `data`
        remain bit-identical. Each element counts once for each part of the positions.
        """
        lengths = [math.prod(self._shards[p].shape) for p in self._summed]
        first = self._summed[0]
        flat = torch.zeros(sum(lengths), dtype=first.dtype, device=first.device)
        for p, row in zip(self._summed, flat.split(lengths), strict=True):
            if p in self._of_stage:
                shard = self._within.shard(p)
                if not shard.is_whole or self._mesh.data.rank == 0:
                    row[shard.start : shard.stop] = _gradient(shard).reshape(-1)
        device = reduction_device(flat.device, self._mesh.world)
        flat = self._mesh.world.allreduce(flat.to(device), "gradients of positions").to(flat.device)
        for p, row in zip(self._summed, flat.split(lengths), strict=True):
            if p in self._of_stage:
                shard = self._within.shard(p)
                gradient = _gradient(shard)
                gradient.copy_(row[shard.start : shard.stop].view(gradient.shape))

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._within.optimizer_step(optimizer)
        self._send_copied()
        if self._stages:
            self._stages.send_tied()

    @torch.no_grad()
    def _send_copied(self) -> None:
        """Broadcasts the owner's weights of the parameters that are replicated in a tensor
        group."""
        if not self._copied:
            return
        held = [self._within.part(p).parameter.detach() for p in self._copied]
        flat = torch.cat([each.reshape(-1) for each in held])
        flat = self._mesh.tensor.broadcast(
            flat.to(reduction_device(flat.device, self._mesh.tensor)), "copied weights"
        ).to(flat.device)
        for each, new in zip(held, flat.split([each.numel() for each in held]), strict=True):
            each.copy_(new.view(each.shape))
        self._within.weights_changed()


def _gradient(shard: Shard) -> torch.Tensor:
    assert shard.parameter.grad is not None
    return shard.parameter.grad
