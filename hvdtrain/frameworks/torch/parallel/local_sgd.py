"""comm.local_steps: each rank makes some local steps, then all ranks average their weights and
optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.buckets import Buckets, group
from hvdtrain.frameworks.torch.strategy import (
    Around,
    NamedParameters,
    Strategy,
    StrategyMemory,
    StrategyTensor,
    reduction_device,
)


class LocalSGD(Strategy):
    """Local SGD (Stich 2019, arXiv:1805.09767, alg. 1) for every optimizer: its floating-point
    state is averaged with the weights.

    A rank uses the mean over its own samples of a step. The ranks average after `local_steps`
    steps, and at every sync point: log.every_steps, a checkpoint, an evaluation. The configuration
    rejects settings that would skip an update on only some ranks.
    """

    local_mean = True

    def __init__(
        self,
        named: NamedParameters,
        communicator: Communicator,
        local_steps: int,
        bucket_bytes: int,
        stopwatch: Stopwatch,
    ) -> None:
        super().__init__(named)
        self._communicator = communicator
        self._local_steps = local_steps
        self._bucket_bytes = bucket_bytes
        self._stopwatch = stopwatch
        self._steps = 0  # since the ranks were equal
        self.summary = f"{local_steps} local steps between averages"

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._steps += 1
        if self._steps == self._local_steps:
            self._stopwatch.enter("communication")
            self.sync(optimizer)
            self._stopwatch.enter("update")

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        """Averages over ranks, if a step was made since the last average."""
        if not self._steps:
            return
        self._steps = 0
        self._average([*self._trained, *self._state_tensors(optimizer)])

    @torch.no_grad()
    def _average(self, averaged: Sequence[torch.Tensor], name: str = "average") -> None:
        """Averages tensors over ranks, in place. A collective."""
        tensors = [torch.nn.Parameter(t.data, requires_grad=False) for t in averaged]
        reductions = []
        for i, bucket in enumerate(group([("", t) for t in tensors], self._bucket_bytes)):
            device = reduction_device(bucket[0].device, self._communicator)
            flat = torch.cat([t.reshape(-1) for t in bucket]).to(device) / self._communicator.size
            reductions.append((bucket, self._communicator.start_allreduce(flat, f"{name}.{i}")))
        for bucket, handle in reductions:
            means = handle.wait().to(bucket[0].device).split([t.numel() for t in bucket])
            torch._foreach_copy_(
                [t.data for t in bucket],
                [mean.view(t.shape) for t, mean in zip(bucket, means, strict=True)],
            )

    def _state_tensors(self, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Returns the floating-point state of each weight, by sorted keys; step counts are equal on
        all ranks."""
        return [
            t
            for p in self._trained
            for key, t in sorted(optimizer.state.get(p, {}).items())
            if key != "step" and torch.is_tensor(t) and t.is_floating_point()
        ]


class PostLocalSGD(Around):
    """Post-local SGD (Lin et al. 2018, arXiv:1808.07217, section 3): the step's `hyper` selects one
    of two strategies.

    Both use the same optimizer, so its state carries over at the change without communication.
    """

    def __init__(self, together: Buckets, apart: LocalSGD, begins: str) -> None:
        """begins: text for when local steps begin."""
        super().__init__(together)
        self._together = together
        self._apart = apart
        self.summary = f"{together.summary}; from {begins} on {apart.summary}"

    def begin_step(self, hyper: Hyper) -> None:
        self._within = self._together if hyper.together else self._apart
        self.local_mean = self._within.local_mean
        self._within.begin_step(hyper)

    def weights_changed(self) -> None:
        self._together.weights_changed()
        self._apart.weights_changed()

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        self._apart.sync(optimizer)

    def tensors(self) -> dict[str, StrategyTensor]:
        return self._apart.tensors()

    def held(self) -> StrategyMemory:
        together = self._together.held()
        return together._replace(in_transit=together.in_transit + self._apart.held().in_transit)
