"""TorchLearner: one rank's torch model, and what a step does to it, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.core.seeds import fold
from hvdtrain.data.source import Source
from hvdtrain.frameworks.learner import Gpu
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.compile import compile_summary, keep_gradients
from hvdtrain.frameworks.torch.device import gpu, seed_dropout
from hvdtrain.frameworks.torch.forward import Forward
from hvdtrain.frameworks.torch.gradients import Meter, NoMeter, add_noise_, clip_
from hvdtrain.frameworks.torch.inputs import DeviceBatch
from hvdtrain.frameworks.torch.nonfinite import any_nonfinite, one_or_nan, zero_where
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.parallel.strategy import Strategy
from hvdtrain.frameworks.torch.precision import loss_scale
from hvdtrain.frameworks.torch.profiler import profile
from hvdtrain.frameworks.torch.state import LearnerState


@dataclass(eq=False)
class TorchLearner:
    """A torch model that gives logits (n, classes) for images (n, C, H, W)."""

    config: Config
    rank: int
    model: torch.nn.Module
    forward: Forward  # of the model, in training through what the strategy made of it
    optimizer: torch.optim.Optimizer  # as the strategy wrapped it, without state
    strategy: Strategy
    meter: Meter | NoMeter  # of the gradient noise scale
    stopwatch: ReplaceableStopwatch  # the strategy's too

    def __post_init__(self) -> None:
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.dtype, self.device = self.parameters[0].dtype, self.parameters[0].device
        self.scale = loss_scale(self.forward.precision, self.device)
        self.buffers = Buffers(self.model, self.device)
        self.skips_nonfinite = self.config.guard.nonfinite == "skip"
        self.waits_only_in_communication = not self.strategy.waits_in_passes and self.config.norm.kind != "sync"
        self._state = LearnerState(self.model, self.optimizer, self.scale)
        rule_optimizer.fill_optimizer_state(self.optimizer)

    def cache_on_device(self, source: Source) -> bool:
        return self.forward.inputs.cache_on_device(source, self.config.data.resident)

    def to_device(self, batch: Batch) -> DeviceBatch:
        return self.forward.inputs.to_device(batch)

    def step(self, micro: Sequence[DeviceBatch], hyper: Hyper, seed: int) -> Sums:
        seed_dropout(fold(seed, self.rank) & (2**63 - 1), self.device)  # each rank's own
        rule_optimizer.set_hyper(self.optimizer, hyper)
        if not self.model.training:  # train() visits every module: a third of a millisecond
            self.model.train()
        if self.skips_nonfinite or self.scale.tensors:
            self.buffers.save()

        sums = self.strategy.run(micro, hyper.batch, self._one_pass)  # which calls _one_pass for each micro-batch

        self.stopwatch.enter("communication")
        self.strategy.reduce()

        self.stopwatch.enter("update")
        sums |= self._update(hyper, seed, sums["count"])
        self.stopwatch.enter("")
        return sums

    def _one_pass(self, batch: DeviceBatch, divisor: int, is_last: bool) -> Sums:
        """Forward and backward of one micro-batch: adds to p.grad the gradient of (sum of its losses) / divisor."""
        if is_last:
            self.meter.last_pass()
        self.stopwatch.enter("forward")
        losses = self.forward.train(batch)
        self.stopwatch.enter("backward")
        (losses.total / divisor * self.scale.scale(one_or_nan(losses.total))).backward()
        if not is_last:
            keep_gradients(self.config.speed.compile, self.parameters)
        return losses.sums

    def _update(self, hyper: Hyper, seed: int, count: int) -> Sums:
        """The optimizer's step from the mean gradient, unless it is to be left out; `count` is the rank's samples.

        Returns "nonfinite" and the keys of the noise scale.
        """
        self.scale.unscale_(self.parameters)
        bad = any_nonfinite(self.parameters)  # before clipping hides it
        overflowed = self.scale.update(bad)
        # ranks with the same gradient each report a share, so that the sum over ranks counts the step once
        sums: Sums = {"nonfinite": bad.double() * (not overflowed) / self.strategy.equal_ranks}
        sums |= zero_where(bad, self.meter.read(hyper, count))
        if overflowed or (self.skips_nonfinite and bad):  # the host waits for the device here
            self.buffers.restore()
        else:
            clip_(self.parameters, self.config.optim.clip_norm, self.config.optim.clip_value)
            add_noise_(self.parameters, hyper.noise, seed)
            self.strategy.optimizer_step(self.optimizer)
        self.optimizer.zero_grad()
        return sums

    def sync_buffers(self, communicator: Communicator) -> None:
        self.strategy.sync(self.optimizer)
        self.buffers.sync_buffers(communicator)

    def evaluate(self, batch: DeviceBatch) -> Sums:
        self.model.eval()
        with torch.no_grad():
            return self.forward.evaluate(batch).sums

    def state(self) -> Arrays:
        return {name: array.copy() for name, array in self.views()}

    def views(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, tensor.detach().cpu().numpy()) for name, tensor in self._state.tensors().items())

    def state_dict_names(self) -> dict[str, str]:
        return self._state.state_dict_names()

    def load(self, state: Arrays) -> None:
        self._state.load(state)

    def describe(self) -> str:
        count = sum(p.numel() for p in self.model.parameters())
        how = f"torch {self.forward.precision.summary} on {self.device}{compile_summary(self.config.speed.compile)}"
        return f"{type(self.model).__name__}, {count:,} parameters, {how}, {self.strategy.summary}"

    def gpu(self) -> Gpu | None:
        return gpu(self.device)

    def profile(self, path: Path) -> AbstractContextManager[None]:
        return profile(self.stopwatch, self.device, path)
