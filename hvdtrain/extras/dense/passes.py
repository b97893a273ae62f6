"""The passes of parallel.dense_updates, in which the dense layers are updated several times in a
step (variable batch)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.extras.dense.cut import turn_learning_rate
from hvdtrain.extras.dense.hybrid import HybridModel
from hvdtrain.extras.dense.keys import DenseKeys
from hvdtrain.frameworks.torch.call import only_one
from hvdtrain.frameworks.torch.inputs import DeviceBatch, samples_of
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.step import OptimizerStep, Passes
from hvdtrain.frameworks.torch.strategy import (
    OnePass,
    Shard,
    Strategy,
    fill_missing,
)


class DenseUpdates(Passes):
    """The variable batch (Krizhevsky 2014, arXiv:1404.5997, section 3.2): a step's passes with an
    update of the dense part after each turn.

    At the end of the step, only the other parameters are updated, from their gradients.

    An update of the dense part depends only on its turn: the mean gradient over the turn's samples,
    clipped separately, the turn's share of the learning rate, and a separate count of updates. If a
    step with non-finite numbers must be skipped, it is skipped from the first such turn on; earlier
    updates are kept.
    """

    def __init__(
        self, config: Config, *of_passes: Any, model: HybridModel, strategy: Strategy
    ) -> None:
        """of_passes: see Passes. Raises UserError for a task whose samples have different
        weights."""
        super().__init__(config, *of_passes)
        forward = self._forward
        if forward.task.sample_weight is None:
            what = (
                "the samples of this task have different weights, so the weight of a turn is "
                "unknown"
            )
            raise UserError(
                what, config.where("parallel.dense_updates"), "parallel.dense_updates=1"
            )
        self._config = config
        self._model = model
        self._strategy = strategy
        self._updates = DenseKeys.of(config).dense_updates
        self._sample_weight = forward.task.sample_weight
        self._dense = [p for p in model.dense_parameters() if p.requires_grad]
        # whether a gradient of the step so far is not finite; of this rank
        self._bad = torch.zeros((), dtype=torch.bool)

    def updated_after(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        dense = set(self._dense)
        return [shard for shard in shards if shard.whole not in dense]

    def left_bad(self, bad: torch.Tensor) -> torch.Tensor:
        return bad | self._bad

    def of_step(self, hyper: Hyper, optimizer: torch.optim.Optimizer) -> OnePass:
        return lambda batch, divisor, is_last: self._all_turns(batch, hyper, optimizer)

    def _all_turns(
        self, batch: DeviceBatch, hyper: Hyper, optimizer: torch.optim.Optimizer
    ) -> Sums:
        """Runs forward and backward for this rank's samples of the step, and the updates of the
        dense part. A collective.

        Afterwards all other parameters have the gradient of the sum of local losses / weight of the
        global batch.
        """
        x = only_one(self._forward.inputs_of(batch))
        sums = zero_sums(self._forward.task.sums)
        self._bad = torch.zeros((), dtype=torch.bool, device=x.device)
        shards = [self._strategy.shard(p) for p in self._dense]
        update = OptimizerStep(
            self._config,
            optimizer,
            self._strategy,
            shards,
            self._scale,
            lambda: None,
            lambda optimizer: optimizer.step(),
        )
        self._stopwatch.enter("forward")
        autocast = functools.partial(self._forward.precision.autocast, x.device)
        for number, turn in enumerate(self._model.turns(x, self._updates, autocast)):
            losses = self._forward.losses(turn.outputs, samples_of(batch, turn.rows), training=True)
            sums = add_sums(sums, losses.sums)
            self._stopwatch.enter("backward")
            self._scaled(losses, turn.samples * self._sample_weight).backward()
            self._stopwatch.enter("update")
            lr = turn_learning_rate(hyper.lr, turn.samples, hyper.batch)
            rule_optimizer.set_hyper(
                optimizer, hyper._replace(lr=lr, step=hyper.step * self._updates + number)
            )
            self._end_turn(update)
            # backward of the convolutions follows the last turn
            self._stopwatch.enter("forward" if number < self._updates - 1 else "backward")
        rule_optimizer.set_hyper(optimizer, hyper)
        return sums

    def _end_turn(self, update: OptimizerStep) -> None:
        fill_missing(self._dense)
        self._bad = self._bad | update.unscaled_are_bad()
        if not (
            update.may_leave_out and update.anywhere(self._bad)
        ):  # the host waits for the device here
            update.apply()  # only updates parameters that have a gradient
        for p in self._dense:
            p.grad = None
