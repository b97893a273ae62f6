"""TorchLoopLearner: adapts a script's model and optimizer to the Learner that checkpoints, replicas
and health use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.order import end_step
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream
from hvdtrain.core.progress import fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.call import Called
from hvdtrain.frameworks.torch.device import keep_gradients, seed_layers
from hvdtrain.frameworks.torch.step import one_or_nan
from hvdtrain.frameworks.torch.user_loop.checks import uncompiled
from hvdtrain.frameworks.torch.user_loop.losses import LossesOfBatch
from hvdtrain.frameworks.torch.user_loop.prepared import AmpScaling, PreparedOptimizer
from hvdtrain.frameworks.torch.user_loop.prepared_model import PreparedModel
from hvdtrain.frameworks.user_loop import Divisor, Samples


class TorchLoopLearner(PreparedModel, LossesOfBatch):
    """Every rank creates one. on_step: called after each step of the optimizer.

    Raises UserError if the model, the optimizer or the engine does not support the configuration.
    """

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
        self._on_step = on_step
        PreparedModel.__init__(self, config, mesh, model, optimizer, example)
        self.local_mean = self.strategy.local_mean
        self.divisor = Divisor(config, mesh.data)
        self.optimizer = PreparedOptimizer(self._inner, self._step)
        self._batch: Samples | None = None  # set until its step was made
        self._global_batch = 0
        self._passed = False  # ctx.backward() was called for it

    def begin_step(self, batch: Samples, global_batch: int, seed: int) -> Samples:
        """Begins a step with this batch. Random numbers of layers depend on the seed of the samples
        and the step."""
        assert self._batch is None, f"step {batch.step} begins before the one before it was made"
        self._batch = batch
        self._global_batch = global_batch
        self._passed = False
        self.divisor.items = None
        seed_layers(fold(seed, batch.step), self.mesh, self.data, self.config, self.device)
        self.begin_training()
        return batch

    def check_prepared(self, model: Any, optimizer: Any, where: str) -> None:
        """Raises UserError if these are not the prepared objects; the model may be compiled or
        not."""
        if uncompiled(model) is not uncompiled(self.forward) or optimizer is not self.optimizer:
            raise UserError(
                "the model or the optimizer is not the one that ctx.prepare() returned",
                where,
                self.words.prepare,
            )

    def begin_passes(self, where: str) -> Samples:
        """Returns the current batch, whose backward pass begins. Raises UserError outside a loop or
        for a second pass."""
        batch = super().begin_passes(where)
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
        return batch

    def backward(self, loss: Any, count: Any, *, retain_graph: bool) -> None:
        """Implements Context.backward(). A collective."""
        if retain_graph:
            raise UserError(
                "retain_graph=True for a second backward pass, but a batch has only one",
                "ctx.backward()",
                "add the losses; or ctx.prepare(model, optimizer, name=), where a batch may have "
                "several",
            )
        self._passes.check_backward("ctx.backward()")
        super().backward(loss, count, retain_graph=False)

    def begin_part(self) -> None:
        self._watch.begin_part()

    def check_counted_parts(self) -> None:
        if self.local_mean and self.strategy.equal_ranks > 1:
            what = (
                "Adasum needs each rank's own mean, but its count is known only after the last part"
            )
            raise UserError(
                what,
                self.config.where("comm.op"),
                "ctx.backward(loss, count=N), or comm.op=average",
            )

    def over_stages(
        self, total: torch.Tensor, weight: float, *, is_counted: bool
    ) -> tuple[torch.Tensor, float, bool]:
        return self._passes.over_stages(total, weight, is_counted=is_counted)

    def show_gradients(self, factor: float = 1.0) -> None:
        self._gradients.show(factor)

    def pass_all(
        self,
        parts: Sequence[Samples],
        loss_of: Callable[[Samples], tuple[torch.Tensor, float]],
        divisor: float,
        *,
        retain_graph: bool = False,
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
        self.make_step(scaled)
        self._batch = None
        self._on_step()

    @property
    def has_stepped(self) -> bool:
        """Whether the last batch's step was made."""
        return self._batch is None

    def load(self, state: Arrays | ArrayStream) -> None:
        super().load(state)
        self._batch = None
