"""PreparedModel: a script's model and optimizer on this rank, their step with the gradient of all
ranks, and their state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Piece
from hvdtrain.errors import UserError
from hvdtrain.frameworks.stopwatch import HostStopwatch, ReplaceableStopwatch
from hvdtrain.frameworks.torch.arrangement import Arrangement, Making, UserModel
from hvdtrain.frameworks.torch.arrangements import arrangement_of
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.build import device_of_rank
from hvdtrain.frameworks.torch.call import Called, each_of
from hvdtrain.frameworks.torch.device import all_on_gpus
from hvdtrain.frameworks.torch.optim.user_optimizer import set_mode
from hvdtrain.frameworks.torch.rank_model import RankModel
from hvdtrain.frameworks.torch.state import LearnerState
from hvdtrain.frameworks.torch.step import OptimizerStep
from hvdtrain.frameworks.torch.strategy import Strategy
from hvdtrain.frameworks.torch.user_loop.checks import check_given, check_gradients, uncompiled
from hvdtrain.frameworks.torch.user_loop.counted import Watch
from hvdtrain.frameworks.torch.user_loop.prepared import (
    WHERE,
    AmpScaling,
    GivenScale,
    PreparedOptimizer,
    ScaleOfLoss,
    as_sample,
    compute_in,
    give_type,
    precision_is_asked,
    precision_of,
    take_optimizer,
)
from hvdtrain.frameworks.torch.user_loop.shown_gradients import ShownGradients


class PreparedModel(RankModel):
    """Every rank creates one.

    Raises UserError if the model, the optimizer or the engine does not support the configuration.
    """

    optimizer: PreparedOptimizer  # set by the learner, which knows when it may step

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        example: Called | None = None,
        prefix: str = "",
    ) -> None:
        """example: inputs (n, ...) of the model for some samples, which parallel.* and
        shard.stage=3 need. prefix: begins the names of collectives."""
        self.config = config
        self.mesh = mesh
        self.data = mesh.data
        self.readers = mesh.data
        self.device = device_of_rank(config, mesh.world)
        take_optimizer(model, optimizer)
        on = {p.device.type for p in model.parameters()}
        if on != {self.device.type} and not (
            on == {"cpu"} and config.shard.stage == 3
        ):  # shard_model() moves one part at a time
            what = (
                f"the model is on {', '.join(sorted(on))}, but this rank computes on {self.device}"
            )
            raise UserError(what, WHERE, "model.to(ctx.device) before the optimizer is created")
        check_gradients(uncompiled(model))
        self.precision = precision_of(config, uncompiled(model), self.device, mesh.world)
        self.sample_type = self.precision.weights if precision_is_asked(config) else None
        check_given(config, model, optimizer, self.device)
        if self.sample_type is not None:
            give_type(uncompiled(model), optimizer, self.precision.weights)
        arrangement = self._arranged(model, optimizer, example, prefix)
        self.model = arrangement.model
        self.orders = arrangement.orders
        self._named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        self.strategy: Strategy = arrangement.strategy(self._named, optimizer)
        wrapped = self.strategy.wrap(
            model if arrangement.body is self.model else arrangement.body, optimizer
        )
        self._inner = wrapped.optimizer
        self._passes = arrangement.loop_passes(wrapped.forward)
        self.forward = self._passes.forward
        if self._passes.calls_model:
            compute_in(self.model, self.precision, self.device)
        self._watch = Watch()
        self.forward.register_forward_hook(self._watch)
        shards = [self.strategy.shard(p) for _, p in self._named]
        self.is_sharded = not all(shard.is_whole for shard in shards)
        self.dtype = self._named[0][1].dtype
        self.buffers = Buffers(self.model, self.device)
        if self.precision.layers is torch.float16:
            self._scale: GivenScale | ScaleOfLoss = ScaleOfLoss(self.device)
        else:
            self._scale = GivenScale(self.is_sharded or config.comm.local_steps > 1)
        self._update = OptimizerStep(
            config, self._inner, self.strategy, shards, self._scale, self.buffers.restore
        )
        self._gradients = ShownGradients(
            [p for _, p in self._named],
            [shard.parameter for shard in shards],
            self.strategy,
            self._scale,
            is_sharded=self.is_sharded,
        )
        self._saves_buffers = self._update.may_leave_out
        self._state = LearnerState(
            self.model,
            self._inner,
            self._scale,
            self.strategy,
            mesh.replicas.rank == 0,
            hashes_on_device=all_on_gpus(self.device, mesh.world),
            trained=[p for _, p in self._named],
        )
        # steps with numbers that are not finite
        self._bad: torch.Tensor = torch.zeros((), dtype=torch.float64, device=self.device)
        self.is_in_step = False  # since a batch began, until its step was made

    def _arranged(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        example: Called | None,
        prefix: str,
    ) -> Arrangement:
        """Returns this rank's part of the script's model, with the optimizer of its parameters."""
        whole = uncompiled(model)
        names = {p: name for name, p in whole.named_parameters()}
        stopwatch = ReplaceableStopwatch(HostStopwatch())
        if example is not None:
            example = each_of(example, lambda x: as_sample(x, self.device, self.sample_type))
        user_model = UserModel(whole, example)
        making = Making(
            self.config,
            None,
            self.mesh,
            self.device,
            self.precision,
            stopwatch,
            user_model=user_model,
            prefix=prefix,
        )
        arrangement = arrangement_of(self.config)(making)
        arrangement.cut()
        now = dict(arrangement.model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [now[names[p]] for p in group["params"]]
        return arrangement

    @property
    def prepared(self) -> tuple[Any, Any]:
        return self.forward, self.optimizer

    @property
    def user_model(self) -> torch.nn.Module:
        return self.model

    def begin_training(self) -> None:
        """Begins a step, before the model is called."""
        self._watch.begin_part()
        self.is_in_step = True
        set_mode(self._inner, training=True)
        if self._saves_buffers:
            self.buffers.save()

    def make_step(self, scaled: AmpScaling | None) -> None:
        """Makes the optimizer's step with the reduced gradients, and clears them; scaled: by a
        GradScaler. A collective."""
        if isinstance(self._scale, GivenScale):
            self._scale.scaled = scaled
        elif scaled is not None:
            what = "a GradScaler together with speed.precision=fp16, which already scales the loss"
            raise UserError(
                what,
                "scaler.step(optimizer)",
                "ctx.backward(loss); optimizer.step(); or leave speed.precision out",
            )
        self._gradients.bring_back()
        self._bad = self._bad + self._update.make(self._update.unscaled_are_bad())["nonfinite"]
        self.zero_grad()
        self.is_in_step = False

    def zero_grad(self) -> None:
        self._gradients.clear()
        self._inner.zero_grad()

    def read_nonfinite(self) -> float:
        """Returns this rank's share of the steps with nonfinite numbers since the last call."""
        count = float(self._bad)
        self._bad = torch.zeros_like(self._bad)
        return count

    @property
    def lr(self) -> float:
        """Returns the current learning rate of the first parameter group; 0 if it has no rate."""
        return float(self._inner.param_groups[0].get("lr", 0.0))

    def sync_buffers(self, communicator: Communicator) -> None:
        self.strategy.sync(self._inner)
        self._show_weights_to_evaluate()
        self.buffers.sync_buffers(communicator)

    def pieces(self) -> Iterator[Piece]:
        self._show_weights_to_evaluate()
        return super().pieces()

    def _show_weights_to_evaluate(self) -> None:
        """Switches an optimizer with modes, whichever the script has set; within a step it computes
        with the weights to train."""
        if not self.is_in_step:
            set_mode(self._inner, training=False)

    def load(self, state: Arrays | ArrayStream) -> None:
        """Loads a state: Learner.load()."""
        set_mode(self._inner, training=False)
        self._state.load(state)
        self.is_in_step = False

    def describe(self) -> str:
        count = self.count(p for _, p in self._named)
        name = self.strategy.class_name(self.model)
        return f"{name}, {count:,} parameters, {self.how_computed(self.precision)}"
