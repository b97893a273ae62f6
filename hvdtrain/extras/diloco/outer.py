"""DiLoCo: after local steps, the mean of what the ranks changed is the gradient of an outer
optimizer; fragments of the model take turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.progress import Hyper
from hvdtrain.extras.diloco.int16 import sum_in_int16
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD
from hvdtrain.frameworks.torch.strategy import (
    NamedParameters,
    StrategyMemory,
    StrategyTensor,
)


class OuterOptimizer(NamedTuple):
    """SGD with Nesterov momentum, as torch.optim.SGD computes it."""

    lr: float
    momentum: float

    def step(self, weight: torch.Tensor, difference: torch.Tensor, mean: torch.Tensor) -> None:
        """Updates a weight and its momentum, `mean`, in place."""
        mean.mul_(self.momentum).add_(difference)
        weight.sub_(difference + self.momentum * mean, alpha=self.lr)


class _Fragment:
    """Parameters that ranks exchange at the same steps."""

    def __init__(self, parameters: list[torch.nn.Parameter], first_step: int) -> None:
        self.parameters = parameters
        self.first_step = first_step
        self.exchanged = 0  # the step, since the ranks were equal


class OuterSteps(LocalSGD):
    """DiLoCo (Douillard 2023, arXiv:2311.08105, alg. 1) and streaming DiLoCo (Douillard 2025,
    arXiv:2501.18512, without its delay and its mixing of weights).

    Fragment i of N is exchanged after steps i local_steps / N + k local_steps. At a sync point all
    fragments are exchanged that have changed, and counting begins again, so that ranks are equal
    there. The inner optimizer's state stays on its rank, as in the paper; at a sync point it
    becomes the mean, so that a checkpoint has one state for any number of ranks
    (test_diloco_jobs.py compares both with NumPy).
    """

    def __init__(
        self,
        named: NamedParameters,
        communicator: Communicator,
        local_steps: int,
        bucket_bytes: int,
        stopwatch: Stopwatch,
        outer: OuterOptimizer,
        fragments: Sequence[list[torch.nn.Parameter]],
        *,
        in_16_bits: bool,
    ) -> None:
        super().__init__(named, communicator, local_steps, bucket_bytes, stopwatch)
        self._names = {p: name for name, p in named}
        self._outer = outer
        self._fragments = [
            _Fragment(parameters, i * local_steps // len(fragments))
            for i, parameters in enumerate(fragments)
        ]
        # the weights after the last exchange, equal on all ranks
        self._common = {p: torch.zeros_like(p, requires_grad=False) for p in self._trained}
        has_momentum = bool(outer.momentum)
        self._momentum = {p: torch.zeros_like(c) for p, c in self._common.items() if has_momentum}
        self._residual = {p: torch.zeros_like(c) for p, c in self._common.items() if in_16_bits}
        self.summary = self._described(local_steps)

    def _described(self, local_steps: int) -> str:
        parts = len(self._fragments)
        words = f"{local_steps} local steps between outer steps"
        if parts > 1:
            megabytes = [
                f"{sum(p.nbytes for p in fragment.parameters) / 1e6:.3g}"
                for fragment in self._fragments
            ]
            words += f" of {parts} fragments ({', '.join(megabytes)} MB)"
        words += f", outer lr {self._outer.lr:g}, momentum {self._outer.momentum:g}"
        return words + ", differences in 16 bits" * bool(self._residual)

    def begin_step(self, hyper: Hyper) -> None:
        if not self._steps:  # the ranks are equal, maybe because weights were loaded
            with torch.no_grad():
                for p, common in self._common.items():
                    common.copy_(p)

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        self._steps += 1
        due = [
            i
            for i, fragment in enumerate(self._fragments)
            if (self._steps - fragment.first_step) % self._local_steps == 0
        ]
        if due:
            self._stopwatch.enter("communication")
            self._exchange(due)
            self._stopwatch.enter("update")

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._steps:
            return
        self._exchange(
            [i for i, each in enumerate(self._fragments) if each.exchanged < self._steps]
        )
        self._average(self._state_tensors(optimizer), "state")
        self._begin()

    def weights_changed(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._steps = 0
        for fragment in self._fragments:
            fragment.exchanged = 0

    @torch.no_grad()
    def _exchange(self, fragments: Sequence[int]) -> None:
        for i in fragments:
            parameters = self._fragments[i].parameters
            self._fragments[i].exchanged = self._steps
            for p, difference in zip(
                parameters, self._mean_differences(parameters, f"fragment.{i}"), strict=True
            ):
                common = self._common[p]
                if self._momentum:
                    self._outer.step(common, difference, self._momentum[p])
                else:
                    common.sub_(difference, alpha=self._outer.lr)
                p.copy_(common)

    def _mean_differences(
        self, parameters: Sequence[torch.nn.Parameter], name: str
    ) -> list[torch.Tensor]:
        """Returns how much lower the weights are than after the last exchange, the mean over ranks.
        A collective."""
        differences = [self._common[p] - p for p in parameters]
        if not self._residual:
            self._average(differences, name)
            return differences
        for difference in differences:
            difference.div_(self._communicator.size)
        residuals = [self._residual[p] for p in parameters]
        return sum_in_int16(self._communicator, differences, residuals, name)

    def tensors(self) -> dict[str, StrategyTensor]:
        rank = self._communicator.rank
        size = self._communicator.size
        momentum = {
            f"{self._names[p]}@outer_momentum": StrategyTensor(tensor)
            for p, tensor in self._momentum.items()
        }
        return momentum | {
            f"{self._names[p]}@residual": StrategyTensor(tensor, size, rank)
            for p, tensor in self._residual.items()
        }

    def held(self) -> StrategyMemory:
        each = (self._common, self._momentum, self._residual)
        return StrategyMemory([], [tensor for one in each for tensor in one.values()])
