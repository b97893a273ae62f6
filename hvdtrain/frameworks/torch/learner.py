"""TorchLearner: one rank's torch model, and the order of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh, make_mesh
from hvdtrain.comm.order import SameOrder, end_step
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch, Readable
from hvdtrain.core.metrics import Sums, zero_sums
from hvdtrain.core.progress import GoOn, Hyper, Progress, WorkerUpdate
from hvdtrain.data.source import Source
from hvdtrain.frameworks.learner import (
    CurrentPass,
    Gpu,
    Learner,
    Predictions,
    TimedPass,
    Waited,
    global_weight,
)
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.call import without_optional
from hvdtrain.frameworks.torch.device import gpu, no_such_kernel, seed_layers
from hvdtrain.frameworks.torch.forward import Forward
from hvdtrain.frameworks.torch.inputs import DeviceBatch
from hvdtrain.frameworks.torch.model import first_samples_of
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.optim.user_optimizer import set_mode
from hvdtrain.frameworks.torch.precision import Scale
from hvdtrain.frameworks.torch.rank_model import RankModel
from hvdtrain.frameworks.torch.state import LearnerState
from hvdtrain.frameworks.torch.step import OptimizerStep, Passes, StepAddition, zero_where
from hvdtrain.frameworks.torch.step_costs import profile
from hvdtrain.frameworks.torch.strategy import Strategy


@dataclass(eq=False)
class TorchLearner(RankModel, Learner):
    """A torch model, its optimizer, and the strategy that reduces gradients."""

    config: Config
    mesh: Mesh
    model: torch.nn.Module
    forward: Forward  # forward pass of the model; in training, of the strategy's wrapped model
    optimizer: torch.optim.Optimizer  # as wrapped by the strategy, without state
    strategy: Strategy
    passes: Passes
    scale: Scale  # scale of the loss
    additions: Sequence[StepAddition]
    stopwatch: ReplaceableStopwatch  # the strategy's too
    waits_only_in_communication: bool
    orders: Sequence[SameOrder] = ()  # in which ranks come to layers
    notes: list[str] = field(default_factory=list)  # lines for the header
    hashes_on_device: bool = False  # see LearnerState

    def __post_init__(self) -> None:
        self.data = self.mesh.evaluators
        self.readers = self.mesh.readers
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.dtype = self.parameters[0].dtype
        self.device = self.forward.inputs.device
        self.buffers = Buffers(self.model, self.device)
        self._take_parts()
        self.saves_buffers = self._update.may_leave_out

    def _take_parts(self) -> None:
        """Takes the parts that this rank updates, without optimizer state."""
        self.shards = [self.strategy.shard(p) for p in self.parameters]
        self.updated = [shard.parameter for shard in self.shards]
        self.is_sharded = not all(shard.is_whole for shard in self.shards) or any(
            own.ranks > 1 for own in self.strategy.tensors().values()
        )
        last = self.passes.updated_after(self.shards)
        self._update = OptimizerStep(
            self.config, self.optimizer, self.strategy, last, self.scale, self.buffers.restore
        )
        self._state = LearnerState(
            self.model,
            self.optimizer,
            self.scale,
            self.strategy,
            self.mesh.replicas.rank == 0,
            hashes_on_device=self.hashes_on_device,
        )
        for addition in self.additions:
            addition.take_parts(self.updated)
        rule_optimizer.fill_optimizer_state(self.optimizer)
        set_mode(self.optimizer, training=False)

    def divide_anew(self) -> None:
        self._regroup()
        self.optimizer = self.strategy.divide_anew(self.mesh)
        self._take_parts()

    def _regroup(self) -> None:
        """Creates the groups of the remaining ranks after a loss. A collective if there are
        groups."""
        self.mesh = make_mesh(self.mesh.world, self.config)
        self.readers = self.mesh.readers

    def how_to_go_on(self, former_rank: int, kept: int) -> GoOn | None:
        how = self.strategy.how_to_go_on(former_rank, kept)
        if how:
            self._regroup()
        return how

    def go_on(self, how: GoOn, kept: int) -> None:
        self.strategy.go_on(how, kept, self.mesh)

    def own_steps(self, steps: Sequence[Progress]) -> Iterable[Progress]:
        return self.strategy.own_steps(steps)

    def read_updates(self) -> list[WorkerUpdate]:
        return self.strategy.read_updates()

    def cache_on_device(self, source: Source) -> bool:
        return self.forward.inputs.cache_on_device(source, self.config.data.resident)

    def to_device(self, batch: Batch) -> DeviceBatch:
        return self.forward.inputs.to_device(batch)

    def step(self, micro: Sequence[DeviceBatch], hyper: Hyper, seed: int) -> Sums:
        if self.readers:  # a rank that reads no samples drops nothing
            seed_layers(seed, self.mesh, self.readers, self.config, self.device)
        rule_optimizer.set_hyper(self.optimizer, hyper)
        for addition in self.additions:
            addition.begin_step(hyper)
        if not self.model.training:  # train() visits every module: a third of a millisecond
            self.model.train()
        set_mode(self.optimizer, training=True)
        if self.saves_buffers:
            self.buffers.save()

        self.strategy.begin_step(hyper)
        divisor = self._divisor(micro, hyper.batch)
        with no_such_kernel(self.config):
            sums = self.strategy.run(
                micro, divisor, self.passes.of_step(hyper, self.optimizer)
            ) or zero_sums(self.forward.task.sums)

        self.stopwatch.enter("communication")
        end_step(self.orders)
        self.strategy.reduce()
        for addition in self.additions:
            addition.reduced()

        self.stopwatch.enter("update")
        sums = self._counted(sums)
        bad = self.passes.left_bad(self._update.unscaled_are_bad())
        sums |= self._update.make(
            bad, hyper, seed, lambda bad: self._measured(bad, hyper, sums["count"])
        )
        self.stopwatch.enter("")
        return sums

    def _measured(self, bad: torch.Tensor, hyper: Hyper, count: int) -> Sums:
        """Returns measurements of the mean gradient, from `count` samples of this rank. bad: ()
        bool, whether it is not finite."""
        found: Sums = {}
        for addition in self.additions:
            found |= addition.read(hyper, count, self.shards, self.strategy.total)
        return zero_where(bad, found)

    def _counted(self, sums: Sums) -> Sums:
        """Returns this rank's share of the sums over its samples, so that samples that several
        ranks read count once."""
        return sums if self.mesh.counts else {name: 0 * value for name, value in sums.items()}

    def _divisor(self, micro: Sequence[DeviceBatch], batch: int) -> float:
        """Returns the divisor of losses before backward, so that the sum of gradients over ranks is
        the mean over the global batch."""
        own = sum(each.weight for each in micro)
        if self.strategy.local_mean or self.readers is None:
            return max(1, own)
        return global_weight(self.forward.task, own, batch, self.readers)

    @property
    def module(self) -> torch.nn.Module:
        return self.model

    @property
    def first_samples(self) -> int:
        return first_samples_of(self.model)

    def begin_with(self, batch: DeviceBatch) -> None:
        model: Any = self.model
        model.begin_with(without_optional(self.forward.inputs_of(batch)))
        self.strategy.weights_changed()

    def trains_one_sample(self) -> bool:
        return not self.strategy.calls_model or self.forward.trains_one_sample(self.model)

    def sync_buffers(self, communicator: Communicator) -> None:
        self.strategy.sync(self.optimizer)
        # at each sync point, so that a resumed job rounds at the same steps as an uninterrupted one
        set_mode(self.optimizer, training=False)
        self.buffers.sync_buffers(communicator, self.mesh.first_reader)

    def evaluate(self, batch: DeviceBatch) -> Sums:
        self.model.eval()
        with torch.no_grad():
            return self._counted(self.passes.evaluate(batch))

    def predict(self, batch: DeviceBatch) -> Predictions:
        self.model.eval()
        with torch.no_grad():
            outputs, sums = self.passes.predict(batch)
        return Predictions(self.forward.predicted(outputs), self._counted(sums))

    def own_names(self, found: Mapping[str, Readable]) -> dict[str, Readable] | None:
        for module in plugins.of_imported_libraries():
            if (renamed := module.in_names_of(self.model, found)) is not None:
                return renamed
        return None

    def load(self, state: Arrays | ArrayStream) -> None:
        set_mode(self.optimizer, training=False)  # a state has the weights of a sync point
        self.notes += self._state.load(state)
        self.optimizer.zero_grad()  # gradients of an interrupted step

    def loss_scale(self) -> float | None:
        return self.scale.value()

    def describe(self) -> str:
        count = self.count(self.model.parameters())
        trained = self.count(self.parameters)
        of_them = f", {trained:,} of them trained" * (trained < count)
        name = self.strategy.class_name(self.model)
        how = self.how_computed(self.forward.precision)
        return f"{name}, {count:,} parameters{of_them}, torch {how}"

    def read_waited(self) -> Waited | None:
        return self.passes.read_waited()

    def last_passes(self) -> list[TimedPass]:
        return self.passes.last_passes()

    def under_way(self) -> CurrentPass | None:
        return self.passes.under_way() or super().under_way()

    def gpu(self) -> Gpu | None:
        return gpu(self.device)

    @property
    def number_type(self) -> str:
        precision = self.forward.precision
        return str(precision.layers or precision.weights).removeprefix("torch.")

    def profile(self, path: Path) -> AbstractContextManager[None]:
        return profile(self.stopwatch, self.device, path)
