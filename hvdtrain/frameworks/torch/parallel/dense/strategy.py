"""parallel.dense: ranks that each have a part of a model's dense layers.

Each element of the training state has one owner: of the dense layers the rank whose part it is in, of all else the one to which ZeRO's
buckets give it. So norms over parameters, noise and checkpoints count everything once.
"""

from __future__ import annotations

from typing import Literal

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.dense.hybrid import HybridModel
from hvdtrain.frameworks.torch.parallel.strategy import Around, NamedParameters, Shard, Wrapped, fill_missing
from hvdtrain.frameworks.torch.parallel.zero import Zero, of_shards, total_over


class Hybrid(Around):
    """The gradients of the dense layers are complete behind backward; those of all other parameters are ZeRO's, of stage 1 or 2.

    A reduction to the owners and the spreading of their weights send what an allreduce does.
    """

    calls_model = False  # without the other ranks

    def __init__(
        self, config: Config, mesh: Mesh, named: NamedParameters, model: HybridModel, stopwatch: Stopwatch, batch: int | None
    ) -> None:
        """batch: samples of a step, for the summary, where they are known."""
        self._world, self._cuts = mesh.world, model.cuts()
        updates = config.parallel.dense_updates
        self._reduced = [p for _, p in named if p in self._cuts and updates == 1]  # else they have no gradient behind the last turn
        stage: Literal[1, 2] = 2 if config.shard.stage == 2 else 1
        others = [(name, p) for name, p in named if p not in self._cuts]
        super().__init__(Zero(others, mesh, stage, int(config.comm.bucket_mb * 2**20), stopwatch, on_host=False))
        self._shards = {p: self.part(p) if p in self._cuts else self._within.shard(p) for _, p in named}
        self.waits_in_passes = any(p.is_cuda for _, p in named)  # parallel/timed.py
        often = f"; updated {updates} times a step" * (updates > 1)
        self.summary = f"{model.summary(batch)}{often}; of the others {self._within.summary}"

    def shard(self, p: torch.nn.Parameter) -> Shard:
        return self._shards[p]

    def part(self, p: torch.nn.Parameter) -> Shard:
        return Shard(p, p, 0, p.numel(), self._cuts[p]) if p in self._cuts else self._within.part(p)

    def total(self, x: torch.Tensor) -> torch.Tensor:
        return total_over(self._world, x)

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return Wrapped(forward, of_shards(optimizer, self._shards, self.total))

    def reduce(self) -> None:
        super().reduce()
        fill_missing(self._reduced)
