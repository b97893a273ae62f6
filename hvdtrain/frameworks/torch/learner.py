"""TorchLearner: one rank's torch model, and what a step does to it, in order; how it is assembled
from an arrangement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh, make_mesh
from hvdtrain.comm.order import SameOrder, doing_in, end_step
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch, Piece
from hvdtrain.core.metrics import Sums, zero_sums
from hvdtrain.core.progress import GoOn, Hyper, Progress, WorkerUpdate, fold
from hvdtrain.data.images.views import make_views
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.by_name import (
    build_rule,
    check_patterns,
    is_made_with_the_model,
    makes_groups,
)
from hvdtrain.frameworks.learner import (
    Gpu,
    Learner,
    Predictions,
    TimedPass,
    UnderWay,
    Waited,
    gather,
    global_weight,
)
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.arrangement import Arrangement
from hvdtrain.frameworks.torch.call import call
from hvdtrain.frameworks.torch.device import (
    compile_summary,
    describe_device,
    dropout_stream,
    gpu,
    no_such_kernel,
    seed_dropout,
)
from hvdtrain.frameworks.torch.forward import (
    ONE_VALUE,
    AddsLoss,
    Forward,
    TrainingModel,
    continue_sequences,
    first_of,
)
from hvdtrain.frameworks.torch.frozen import lines, ties_of
from hvdtrain.frameworks.torch.inputs import DeviceBatch, Inputs, use_channels_last
from hvdtrain.frameworks.torch.libraries.transformers import in_names_of
from hvdtrain.frameworks.torch.model import first_samples_of
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.optim.user_optimizer import construct_groups, set_mode
from hvdtrain.frameworks.torch.parallel.buffers import Buffers, copied_buffers
from hvdtrain.frameworks.torch.parallel.strategy import NamedParameters, Strategy
from hvdtrain.frameworks.torch.parallel.tensor.collectives import whole_logits
from hvdtrain.frameworks.torch.precision import Scale, loss_scale
from hvdtrain.frameworks.torch.state import LearnerState, averaged
from hvdtrain.frameworks.torch.step import Meter, NoMeter, Passes, Update, zero_where
from hvdtrain.frameworks.torch.step_costs import profile
from hvdtrain.frameworks.torch.thaw import Thaw
from hvdtrain.tasks.task import Place, part_of


@dataclass(eq=False)
class TorchLearner(Learner):
    """A torch model, its optimizer, and how the ranks' gradients become one."""

    config: Config
    mesh: Mesh
    model: torch.nn.Module
    forward: Forward  # of the model, in training through what the strategy made of it
    optimizer: torch.optim.Optimizer  # as the strategy wrapped it, without state
    strategy: Strategy
    passes: Passes
    scale: Scale  # of the loss
    meter: Meter | NoMeter  # of the gradient noise scale
    stopwatch: ReplaceableStopwatch  # the strategy's too
    orders: Sequence[SameOrder] = ()  # in which ranks come to layers
    notes: list[str] = field(default_factory=list)  # lines for the header

    def __post_init__(self) -> None:
        self.data = self.mesh.data
        self.readers = self.mesh.readers
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.dtype = self.parameters[0].dtype
        self.device = self.forward.inputs.device
        self.buffers = Buffers(self.model, self.device)
        self.saves_buffers = self.config.guard.nonfinite == "skip" or bool(self.scale.tensors)
        self.waits_only_in_communication = (
            not self.strategy.waits_in_passes and self.config.norm.kind != "sync"
        )
        self.notes = [
            *self.notes,
            *(getattr(self.model, "notes", ()) if isinstance(self.model, AddsLoss) else ()),
        ]
        self._take_parts()

    def _take_parts(self) -> None:
        """What this rank updates, without optimizer state."""
        self.shards = [self.strategy.shard(p) for p in self.parameters]
        self.updated = [shard.parameter for shard in self.shards]
        self.is_sharded = not all(shard.is_whole for shard in self.shards)
        last = self.passes.updated_after(self.shards)
        self._update = Update(
            self.config, self.optimizer, self.strategy, last, self.scale, self.buffers.restore
        )
        self._state = LearnerState(
            self.model, self.optimizer, self.scale, self.strategy, self.mesh.replicas.rank == 0
        )
        self._thaw = Thaw(
            self.model, [entry.names for entry in self.config.model.thaw], self.updated
        )
        rule_optimizer.fill_optimizer_state(self.optimizer)
        set_mode(self.optimizer, training=False)

    def divide_anew(self) -> None:
        self._regroup()
        self.optimizer = self.strategy.divide_anew(self.mesh)
        self._take_parts()

    def _regroup(self) -> None:
        """After ranks were lost: the groups of those that are left. A collective where there are
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
            seed_dropout(
                fold(seed, dropout_stream(self.mesh, self.readers, self.config)) & (2**63 - 1),
                self.device,
            )
        rule_optimizer.set_hyper(self.optimizer, hyper)
        self._thaw.begin_step(hyper)
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
        self._thaw.clear_gradients()

        self.stopwatch.enter("update")
        sums = self._counted(sums)
        bad = self.passes.left_bad(self._update.unscaled_are_bad())
        sums |= self._update.make(
            bad, hyper.noise, seed, lambda bad: self._measured(bad, hyper, sums["count"])
        )
        self.stopwatch.enter("")
        return sums

    def _measured(self, bad: torch.Tensor, hyper: Hyper, count: int) -> Sums:
        """What is measured of the mean gradient, from `count` samples of this rank; bad: () bool,
        whether it is not finite."""
        return zero_where(bad, self.meter.read(hyper, count, self.shards, self.strategy.total))

    def _counted(self, sums: Sums) -> Sums:
        """What this rank reports of the sums over its samples, so that those that read the same
        ones count them once."""
        return sums if self.mesh.counts else {name: 0 * value for name, value in sums.items()}

    def _divisor(self, micro: Sequence[DeviceBatch], batch: int) -> int:
        """What the losses are divided by before backward, so that the sum of gradients over ranks
        is the mean over the global batch."""
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
        model.begin_with(self.forward.inputs_of(batch))
        self.strategy.weights_changed()

    def trains_one_sample(self) -> bool:
        if not self.strategy.calls_model or not any(
            isinstance(module, _BatchNorm) for module in self.model.modules()
        ):
            return True
        inputs = self.forward.inputs_of(self.forward.inputs.zeros(1))
        try:
            autocast = self.forward.precision.autocast(self.device)
            with (
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
                copied_buffers(self.model),
                autocast,
            ):
                call(self.model.train(), inputs)
        except ValueError as error:
            return ONE_VALUE not in f"{error}"
        return True

    def sync_buffers(self, communicator: Communicator) -> None:
        self.strategy.sync(self.optimizer)
        # at each sync point, so that a resumed job rounds where an uninterrupted one does
        set_mode(self.optimizer, training=False)
        self.buffers.sync_buffers(communicator, self.mesh.servers)

    def averaged(self) -> AbstractContextManager[None]:
        return (
            nullcontext()
            if self.config.optim.ema is None
            else averaged(self.optimizer, self.strategy, self.parameters)
        )

    def evaluate(self, batch: DeviceBatch) -> Sums:
        self.model.eval()
        with torch.no_grad():
            return self._counted(self.passes.evaluate(batch))

    def predict(self, batch: DeviceBatch) -> Predictions:
        self.model.eval()
        with torch.no_grad():
            outputs, sums = self.passes.predict(batch)
        return Predictions(first_of(whole_logits(outputs)).cpu().numpy(), self._counted(sums))

    def continue_sequences(
        self,
        prompts: np.ndarray,
        length: int,
        *,
        tokens: int,
        temperature: float,
        seed: int,
        first: int,
        before_each: Callable[[], None],
    ) -> np.ndarray:
        if not hasattr(self.model, "empty_cache"):
            what = (
                f"{type(self.model).__name__} has no empty_cache(), by which it would be read "
                "token by token"
            )
            raise UserError(what, self.config.where("model.name"), "a run with model.name=gpt")
        self.model.eval()
        model: Any = self.model
        keeps_up = self.strategy.gathers_in_passes and not len(prompts)
        given = torch.from_numpy(
            np.zeros((1, prompts.shape[1]), np.int64) if keeps_up else prompts
        ).to(self.device)
        with self.forward.precision.autocast(self.device):
            found = continue_sequences(
                model,
                given,
                length,
                tokens=tokens,
                temperature=temperature,
                seed=seed,
                first=first,
                before_each=before_each,
            )
        return found[: len(prompts)].cpu().numpy()

    def state(self, *, is_kept: bool = True) -> Arrays:
        return gather(self.mesh.parts, self.pieces(), is_kept=is_kept)

    def weights(self) -> Arrays:
        """Copies of weights and buffers by the names of the model's state dict, as evaluations have
        them: averages with optim.ema.

        A collective where ranks have parts of them, or of the averages.
        """
        with self.averaged():
            arrays = gather(
                self.mesh.parts,
                (piece for piece in self.pieces() if not piece.name.startswith("s.")),
            )
        return {name: arrays[own] for name, own in self.state_dict_names().items()}

    def pieces(self) -> Iterator[Piece]:
        return self._state.pieces()

    def state_dict_names(self) -> dict[str, str]:
        return self._state.state_dict_names()

    def own_names(self, found: Arrays) -> Arrays | None:
        return in_names_of(self.model, found)

    def load(self, state: Arrays | ArrayStream) -> None:
        set_mode(self.optimizer, training=False)  # a state has the weights of a sync point
        self._state.load(state)
        self.optimizer.zero_grad()  # of a step that was cut off

    def describe(self) -> str:
        name = self.strategy.class_name(self.model)
        count = sum(math.prod(self.strategy.part(p).shape) for p in self.model.parameters())
        trained = sum(
            math.prod(self.strategy.part(p).shape)
            for p in self.model.parameters()
            if p.requires_grad
        )
        of_them = f", {trained:,} of them trained" * (trained < count)
        precision = self.forward.precision
        device = f"{describe_device(self.device)}{precision.note}"
        how = f"torch {precision.summary} on {device}{compile_summary(self.config.speed.compile)}"
        return f"{name}, {count:,} parameters{of_them}, {how}, {self.strategy.summary}"

    def read_waited(self) -> Waited | None:
        return self.passes.read_waited()

    def last_passes(self) -> list[TimedPass]:
        return self.passes.last_passes()

    def under_way(self) -> UnderWay | None:
        found = self.passes.under_way()
        doing = doing_in(self.orders)
        return UnderWay(doing, None) if found is None and doing else found

    def gpu(self) -> Gpu | None:
        return gpu(self.device)

    def profile(self, path: Path) -> AbstractContextManager[None]:
        return profile(self.stopwatch, self.device, path)


def arrangement_of(config: Config) -> type[Arrangement]:
    """The one that the configuration asks for; it alone is imported."""
    if config.shard.stage == 3:
        from hvdtrain.frameworks.torch.rows import Rows  # half a second

        return Rows
    if config.parallel.ranks > 1:
        from hvdtrain.frameworks.torch.layers import (
            Layers,
        )  # torch.distributed.pipelining: half a second

        return Layers
    if config.parallel.dense != "none":
        from hvdtrain.frameworks.torch.dense import Dense

        return Dense
    if config.servers.count:
        from hvdtrain.frameworks.torch.servers import Servers

        return Servers
    return Arrangement


def assemble(arrangement: Arrangement) -> TorchLearner:
    """The learner of an arrangement, whose model is checked and cut."""
    making = arrangement.making
    config = arrangement.making.config
    mesh = arrangement.making.mesh
    device = arrangement.making.device
    task = making.task
    precision = making.precision
    stopwatch = making.stopwatch
    assert task is not None, "own_loop/ has a script's own model"
    model = arrangement.model
    is_users_class = plugins.is_dotted(config.model.name)
    channels_last = use_channels_last(
        config.speed.channels_last, is_users_class, model, device, arrangement.keeps_memory_order
    )
    inputs = Inputs(task, device, precision.weights, channels_last)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    parameters = [p for _, p in named]
    notes = check_patterns(
        config, {name: tuple(p.shape) for name, p in named}, ties_of(model)
    ) + lines(model, config.model)
    optimizer = make_optimizer(config, named)
    meter: Meter | NoMeter = NoMeter()
    if (
        config.log.noise_scale
    ):  # before the strategy: the meter's hooks come first, and see a rank's own gradients
        meter = Meter(parameters, mesh.world)
    strategy = arrangement.strategy(named, optimizer)
    body = arrangement.body
    when_empty = arrangement.when_empty
    wrapped = strategy.wrap(TrainingModel(body, when_empty), optimizer)
    if isinstance(model, AddsLoss):
        wrapped.optimizer.register_step_post_hook(lambda *_: model.constrain())
    part = part_of(task, "torch", config, Place(precision.weights, device))
    forward = Forward(
        wrapped.forward,
        body,
        inputs,
        precision,
        task,
        part,
        make_views(config, task.fields),
        when_empty,
    )
    scale = loss_scale(precision, device)
    passes = arrangement.passes(strategy, config, forward, scale, stopwatch, parameters, meter)
    return TorchLearner(
        config,
        mesh,
        model,
        forward,
        wrapped.optimizer,
        strategy,
        passes,
        scale,
        meter,
        stopwatch,
        arrangement.all_orders,
        notes,
    )


def make_optimizer(config: Config, named: NamedParameters) -> torch.optim.Optimizer:
    """The optimizer that optim.name means: one of our rules, a class of torch.optim, or what a
    function makes of the parameters."""
    name = config.optim.name
    if is_made_with_the_model(config):
        constructor = plugins.own_function(config.optim)
        if makes_groups(constructor):
            return construct_groups(constructor, named, config)
        return rule_optimizer.make_user_optimizer(constructor, name, named, config)
    return rule_optimizer.make_optimizer(
        build_rule(config), named, config.optim.exclude == "norms_and_biases"
    )
