"""TorchLoopLearner: adapts a script's model and optimizer to the Learner that checkpoints, replicas
and health use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import end_step
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch, Piece
from hvdtrain.core.progress import fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.stopwatch import HostStopwatch, ReplaceableStopwatch
from hvdtrain.frameworks.torch.arrangement import Arrangement, Making, UserModel
from hvdtrain.frameworks.torch.arrangements import arrangement_of
from hvdtrain.frameworks.torch.buffers import Buffers
from hvdtrain.frameworks.torch.build import device_of_rank
from hvdtrain.frameworks.torch.call import Called, each_of
from hvdtrain.frameworks.torch.device import (
    all_on_gpus,
    keep_gradients,
    seed_layers,
)
from hvdtrain.frameworks.torch.optim.user_optimizer import set_mode
from hvdtrain.frameworks.torch.rank_model import RankModel
from hvdtrain.frameworks.torch.state import LearnerState
from hvdtrain.frameworks.torch.step import OptimizerStep, one_or_nan
from hvdtrain.frameworks.torch.strategy import Strategy
from hvdtrain.frameworks.torch.user_loop.checks import check_given, check_gradients, uncompiled
from hvdtrain.frameworks.torch.user_loop.counted import (
    Accumulated,
    Watch,
    check_loss,
    check_mean_over_samples,
)
from hvdtrain.frameworks.torch.user_loop.prepared import (
    WHERE,
    AmpScaling,
    GivenScale,
    PreparedOptimizer,
    ScaleOfLoss,
    compute_in,
    give_type,
    precision_is_asked,
    precision_of,
    take_optimizer,
)
from hvdtrain.frameworks.torch.user_loop.shown_gradients import ShownGradients
from hvdtrain.frameworks.torch.user_loop.words import WORDS
from hvdtrain.frameworks.user_loop import Divisor, LoopLearner, Samples, item_count


class TorchLoopLearner(RankModel, LoopLearner):
    """Every rank creates one. on_step: called after each step of the optimizer.

    Raises UserError if the model, the optimizer or the engine does not support the configuration.
    """

    words = WORDS

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        on_step: Callable[[], None],
        example: Called | None = None,
    ) -> None:
        """example: inputs (n, ...) of the model for some samples, which parallel.* and
        shard.stage=3 need."""
        self.config = config
        self.mesh = mesh
        self.data = mesh.data
        self._on_step = on_step
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
        self._sample_type = self.precision.weights if precision_is_asked(config) else None
        check_given(config, model, optimizer, self.device)
        if self._sample_type is not None:
            give_type(uncompiled(model), optimizer, self.precision.weights)
        arrangement = self._arranged(model, optimizer, example)
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
        self.divisor = Divisor(config, mesh.data)
        self.optimizer = PreparedOptimizer(self._inner, self._step)
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
        )
        # steps with numbers that are not finite
        self._bad: torch.Tensor = torch.zeros((), dtype=torch.float64, device=self.device)
        self._batch: Samples | None = None  # set until its step was made
        self._global_batch = 0
        self._passed = False  # ctx.backward() was called for it

    def _arranged(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, example: Called | None
    ) -> Arrangement:
        """Returns this rank's part of the script's model, with the optimizer of its parameters."""
        whole = uncompiled(model)
        names = {p: name for name, p in whole.named_parameters()}
        if example is not None:
            example = each_of(example, self._as_sample)
        stopwatch = ReplaceableStopwatch(HostStopwatch())
        user_model = UserModel(whole, example)
        making = Making(
            self.config,
            None,
            self.mesh,
            self.device,
            self.precision,
            stopwatch,
            user_model=user_model,
        )
        arrangement = arrangement_of(self.config)(making)
        arrangement.cut()
        now = dict(arrangement.model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [now[names[p]] for p in group["params"]]
        return arrangement

    def _as_sample(self, x: torch.Tensor) -> torch.Tensor:
        """Converts a tensor of the script to the dtype and device of samples."""
        x = x.detach().to(self.device)
        return (
            x.to(self._sample_type)
            if self._sample_type is not None and x.is_floating_point()
            else x
        )

    def to_device(self, batch: Batch) -> Samples:
        """Converts numpy fields (n, ...) to tensors on the device, with the same dtype; with
        speed.precision, in the dtype of the weights."""
        fields = {
            name: torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self.device)
            for name, array in batch.items()
        }
        if self._sample_type is not None:
            fields = {
                name: t.to(self._sample_type) if t.is_floating_point() else t
                for name, t in fields.items()
            }
        return Samples(fields, len(next(iter(batch.values()))))

    def begin_step(self, batch: Samples, global_batch: int, seed: int) -> Samples:
        """Begins a step with this batch. Random numbers of layers depend on the seed of the samples
        and the step."""
        assert self._batch is None, f"step {batch.step} begins before the one before it was made"
        self._batch = batch
        self._global_batch = global_batch
        self._passed = False
        self._watch.begin_part()
        self.divisor.items = None
        set_mode(self._inner, training=True)
        seed_layers(fold(seed, batch.step), self.mesh, self.data, self.config, self.device)
        if self._saves_buffers:
            self.buffers.save()
        return batch

    @property
    def prepared(self) -> tuple[Any, Any]:
        return self.forward, self.optimizer

    @property
    def user_model(self) -> torch.nn.Module:
        return self.model

    def check_prepared(self, model: Any, optimizer: Any, where: str) -> None:
        """Raises UserError if these are not the prepared objects; the model may be compiled or
        not."""
        if uncompiled(model) is not uncompiled(self.forward) or optimizer is not self.optimizer:
            raise UserError(
                "the model or the optimizer is not the one that ctx.prepare() returned",
                where,
                self.words.prepare,
            )

    def check_resume(self, given: tuple[Any, ...]) -> None:
        if given:
            what = (
                "ctx.resume() takes no model or optimizer: it loads the checkpoint into those of "
                "ctx.prepare()"
            )
            raise UserError(what, "ctx.resume()", self.words.resume)

    def resumed(self, extra: dict[str, Any]) -> dict[str, Any]:
        return extra

    def backward(self, loss: Any, count: Any) -> None:
        """Implements Context.backward(). A collective."""
        where = "ctx.backward()"
        fix = "ctx.backward(loss, count=N), N: how many items the loss is the mean over"
        self._passes.check_backward(where)
        batch = self._begin_passes(where)
        check_loss(loss, where)
        if count is None:
            self.divisor.need_count(where, fix)
        self.divisor.agree(where, is_counted=count is not None)
        if count is None:
            self._check_mean(loss, 1, where, fix)
            weight = float(batch.count)
            divisor = self._divisor_of_samples(batch)
        else:
            weight = item_count(count, where) if batch.count else 0.0
            divisor = self._divisor_of_items(weight)
        self._pass_all([batch], lambda _: (loss, weight), divisor)
        self._gradients.show()

    def accumulate(self, loss_of: Callable[[Samples], Any], at_most: int) -> torch.Tensor:
        """Implements Context.accumulate(). A collective."""
        where = "ctx.accumulate()"
        fix = "return loss, N in loss_of(part), N: how many items the loss is the mean over"
        batch = self._begin_passes(where)
        largest_share = math.ceil(self._global_batch / self.data.size)
        passes = math.ceil(largest_share / at_most)  # the same number on every rank
        losses = Accumulated(loss_of, self.divisor, self.device)

        def of_part(part: Samples) -> tuple[torch.Tensor, float]:
            self._watch.begin_part()
            loss, weight = losses.of_part(part)
            if not losses.is_counted:
                self._check_mean(loss, passes, where, fix)
            elif self.strategy.local_mean and self.strategy.equal_ranks > 1:
                what = (
                    "Adasum needs each rank's own mean, but its count is known only after the "
                    "last part"
                )
                raise UserError(
                    what,
                    self.config.where("comm.op"),
                    "ctx.backward(loss, count=N), or comm.op=average",
                )
            return loss, weight

        divisor = self._divisor_of_samples(batch)
        self._pass_all(batch.micro_batches(passes), of_part, divisor)
        total, weight, is_counted = self._passes.over_stages(
            losses.total, losses.weight, is_counted=bool(losses.is_counted)
        )
        self.divisor.agree(where, is_counted=is_counted)
        self._gradients.show(divisor / self._divisor_of_items(weight) if is_counted else 1.0)
        return total / (weight or 1.0)

    def _check_mean(self, loss: torch.Tensor, parts: int, where: str, fix: str) -> None:
        """Raises UserError for a mean that is not over samples if parts or ranks are weighted by
        samples."""
        is_cheap = self.device.type == "cpu" or not self._batch or not self._batch.step
        if is_cheap and (parts > 1 or self.data.size > 1):
            check_mean_over_samples(loss, where, fix)

    def _divisor_of_samples(self, batch: Samples) -> float:
        # the sum over ranks is then the mean
        return float(max(1, batch.count) if self.strategy.local_mean else self._global_batch)

    def _divisor_of_items(self, weight: float) -> float:
        """Returns the divisor for all ranks' items; weight: this rank's. A collective."""
        total = self.divisor.total(weight)
        return (weight or 1.0) if self.strategy.local_mean else total

    def _begin_passes(self, where: str) -> Samples:
        """Returns the current batch, whose backward pass begins. Raises UserError outside a loop or
        for a second pass."""
        if self._batch is None:
            once = (
                "loss = loss_of(model(batch['x']), batch['y']); ctx.backward(loss); "
                "optimizer.step()"
            )
            fix = (
                f"for batch in ctx.samples(dataset, batch=N): {once}; a DataLoader is not needed, "
                "give its data set"
            )
            raise UserError("called outside of a loop over ctx.samples()", where, fix)
        if self._passed:
            what = (
                "a second backward pass for one batch: the first one already reduced the "
                "gradients over all ranks"
            )
            fix = (
                "add the losses and call it once; to accumulate gradients: "
                "ctx.accumulate(loss_of, at_most=SAMPLES)"
            )
            raise UserError(what, where, fix)
        self._passed = True
        return self._batch

    def _pass_all(
        self,
        parts: Sequence[Samples],
        loss_of: Callable[[Samples], tuple[torch.Tensor, float]],
        divisor: float,
    ) -> None:
        """Runs forward and backward for each part. After the last one p.grad is the sum over all
        ranks of weight * loss / divisor."""

        def weighted(part: Any, found: tuple[torch.Tensor, float]) -> torch.Tensor:
            loss, weight = found
            self._watch.set_counted(weight > 0)
            factor = self._scale.scale(one_or_nan(loss)) if weight else 1.0
            return (loss * (weight / divisor) * factor).sum()

        def ended(is_last: bool) -> None:
            self._watch.begin_part()
            if not is_last:
                keep_gradients(self.config.speed.compile, [p for _, p in self._named])

        one_pass = self._passes.one_pass(loss_of, weighted, ended)
        self.strategy.run(parts, self._global_batch, one_pass)
        end_step(self.orders)
        self.strategy.reduce()

    def _step(self, scaled: AmpScaling | None) -> None:
        """Makes the optimizer's step with the mean gradient over the global batch; scaled: by a
        GradScaler. A collective."""
        if self._batch is None or not self._passed:
            what = (
                "optimizer.step() without ctx.backward(loss)"
                if self._batch is not None
                else "optimizer.step() without a new batch"
            )
            fix = (
                "ctx.backward(loss) instead of loss.backward(): it weights this rank's samples "
                "and reduces the gradient over all ranks"
            )
            raise UserError(
                what,
                "optimizer.step()",
                fix if self._batch is not None else "one step for each batch of ctx.samples()",
            )
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
        self._batch = None
        self._on_step()

    @property
    def has_stepped(self) -> bool:
        """Whether the last batch's step was made."""
        return self._batch is None

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
        if self._batch is None:
            set_mode(self._inner, training=False)

    def load(self, state: Arrays | ArrayStream) -> None:
        """Loads a state: Learner.load()."""
        set_mode(self._inner, training=False)
        self._state.load(state)
        self._batch = None

    def describe(self) -> str:
        count = self.count(p for _, p in self._named)
        name = self.strategy.class_name(self.model)
        return f"{name}, {count:,} parameters, {self.how_computed(self.precision)}"
