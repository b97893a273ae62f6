"""The calls of a custom loop that take a loss: it is weighted with this rank's share of the
batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Batch
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.user_loop.counted import (
    Accumulated,
    check_loss,
    check_mean_over_samples,
)
from hvdtrain.frameworks.torch.user_loop.words import WORDS
from hvdtrain.frameworks.user_loop import LoopLearner, Samples, item_count

ONCE = "loss = loss_of(model(batch['x']), batch['y']); ctx.backward(loss); optimizer.step()"


class LossesOfBatch(LoopLearner):
    """Adds up weight * loss / divisor over parts and ranks, whose gradient is that of the mean over
    the batch."""

    words = WORDS
    config: Config
    data: Communicator  # the ranks that read different samples
    device: torch.device
    sample_type: torch.dtype | None  # of floating-point samples; None: as they are
    local_mean = False  # each rank learns from the mean over its own samples
    _batch: Samples | None  # None outside of a step
    _global_batch: int

    def begin_passes(self, where: str) -> Samples:
        """Returns the current batch, whose backward pass begins. Raises UserError outside a loop
        over samples."""
        if self._batch is None:
            fix = (
                f"for batch in ctx.samples(dataset, batch=N): {ONCE}; a DataLoader is not needed, "
                "give its data set"
            )
            raise UserError("called outside of a loop over ctx.samples()", where, fix)
        return self._batch

    def begin_part(self) -> None:
        """Called before the forward pass of each part of a batch."""
        raise NotImplementedError

    def pass_all(
        self,
        parts: Sequence[Samples],
        loss_of: Callable[[Samples], tuple[torch.Tensor, float]],
        divisor: float,
        *,
        retain_graph: bool = False,
    ) -> None:
        """Runs forward and backward for each part, from weight * loss / divisor."""
        raise NotImplementedError

    def show_gradients(self, factor: float = 1.0) -> None:
        """Called after the last part; factor: of the gradients."""
        raise NotImplementedError

    def check_counted_parts(self) -> None:
        """Raises UserError if parts of a batch cannot be weighted with counts, whose sum is known
        only after the last part."""

    def over_stages(
        self, total: torch.Tensor, weight: float, *, is_counted: bool
    ) -> tuple[torch.Tensor, float, bool]:
        """Returns LoopPasses.over_stages()."""
        return total, weight, is_counted

    def to_device(self, batch: Batch) -> Samples:
        """Converts numpy fields (n, ...) to tensors on the device, with the same dtype; with
        speed.precision, in the dtype of the weights."""
        fields = {
            name: torch.from_numpy(np.require(array, requirements=["C", "W"])).to(self.device)
            for name, array in batch.items()
        }
        if self.sample_type is not None:
            fields = {
                name: t.to(self.sample_type) if t.is_floating_point() else t
                for name, t in fields.items()
            }
        return Samples(fields, len(next(iter(batch.values()))))

    def check_resume(self, given: tuple[Any, ...]) -> None:
        if given:
            what = (
                "ctx.resume() takes no model or optimizer: it loads the checkpoint into those of "
                "ctx.prepare()"
            )
            raise UserError(what, "ctx.resume()", self.words.resume)

    def resumed(self, extra: dict[str, Any]) -> dict[str, Any]:
        return extra

    def backward(self, loss: Any, count: Any, *, retain_graph: bool) -> None:
        """Implements Context.backward(). A collective."""
        where = "ctx.backward()"
        fix = "ctx.backward(loss, count=N), N: how many items the loss is the mean over"
        batch = self.begin_passes(where)
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
        self.pass_all([batch], lambda _: (loss, weight), divisor, retain_graph=retain_graph)
        self.show_gradients()

    def accumulate(self, loss_of: Callable[[Samples], Any], at_most: int) -> torch.Tensor:
        """Implements Context.accumulate(). A collective."""
        where = "ctx.accumulate()"
        fix = "return loss, N in loss_of(part), N: how many items the loss is the mean over"
        batch = self.begin_passes(where)
        largest_share = math.ceil(self._global_batch / self.data.size)
        passes = math.ceil(largest_share / at_most)  # the same number on every rank
        losses = Accumulated(loss_of, self.divisor, self.device)

        def of_part(part: Samples) -> tuple[torch.Tensor, float]:
            self.begin_part()
            loss, weight = losses.of_part(part)
            if not losses.is_counted:
                self._check_mean(loss, passes, where, fix)
            else:
                self.check_counted_parts()
            return loss, weight

        divisor = self._divisor_of_samples(batch)
        self.pass_all(batch.micro_batches(passes), of_part, divisor)
        total, weight, is_counted = self.over_stages(
            losses.total, losses.weight, is_counted=bool(losses.is_counted)
        )
        self.divisor.agree(where, is_counted=is_counted)
        self.show_gradients(divisor / self._divisor_of_items(weight) if is_counted else 1.0)
        return total / (weight or 1.0)

    def _check_mean(self, loss: torch.Tensor, parts: int, where: str, fix: str) -> None:
        """Raises UserError for a mean that is not over samples if parts or ranks are weighted by
        samples."""
        is_cheap = self.device.type == "cpu" or not self._batch or not self._batch.step
        if is_cheap and (parts > 1 or self.data.size > 1):
            check_mean_over_samples(loss, where, fix)

    def _divisor_of_samples(self, batch: Samples) -> float:
        # the sum over ranks is then the mean
        return float(max(1, batch.count) if self.local_mean else self._global_batch)

    def _divisor_of_items(self, weight: float) -> float:
        """Returns the divisor for all ranks' items; weight: this rank's. A collective."""
        total = self.divisor.total(weight)
        return (weight or 1.0) if self.local_mean else total
