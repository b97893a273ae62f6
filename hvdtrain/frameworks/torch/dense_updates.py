"""The variable batch: a step's passes with an update of the dense part after each turn (Krizhevsky 2014, arXiv:1404.5997, section 3.2)."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums, add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.forward import Forward
from hvdtrain.frameworks.torch.gradients import clip_
from hvdtrain.frameworks.torch.inputs import DeviceBatch, samples_of
from hvdtrain.frameworks.torch.nonfinite import any_nonfinite, one_or_nan
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.parallel.dense.hybrid import HybridModel
from hvdtrain.frameworks.torch.parallel.dense.turns import turn_learning_rate
from hvdtrain.frameworks.torch.parallel.strategy import Shard, Strategy, fill_missing
from hvdtrain.frameworks.torch.precision import LossScale, NoScale


class DenseUpdates:
    """The updates of parallel.dense_updates. The step's end is left with the update of all other parameters, from their gradients.

    An update of the dense part is made of its turn alone: the mean gradient over the turn's samples, clipped by itself, the turn's share of
    the learning rate, and a rule's count of updates. Where a step with numbers that are not finite is to be left out, it is from the first
    such turn on: the updates before it stay.
    """

    def __init__(
        self, config: Config, model: HybridModel, forward: Forward, strategy: Strategy, scale: NoScale | LossScale, stopwatch: Stopwatch
    ) -> None:
        """Raises UserError for a task whose samples do not all weigh the same."""
        if forward.task.sample_weight is None:
            what = "the samples of this task do not all weigh the same, and the weight of a turn is not known"
            raise UserError(what, config.where("parallel.dense_updates"), "parallel.dense_updates=1")
        self._updates, self._clip = config.parallel.dense_updates, (config.optim.clip_norm, config.optim.clip_value)
        self._model, self._forward, self._strategy, self._scale, self._stopwatch = model, forward, strategy, scale, stopwatch
        self._sample_weight = forward.task.sample_weight
        self._leaves_out = config.guard.nonfinite == "skip" or bool(scale.tensors)
        self.parameters = [p for p in model.dense_parameters() if p.requires_grad]
        self._shards = [strategy.shard(p) for p in self.parameters]
        self.bad = torch.zeros((), dtype=torch.bool)  # whether a gradient of the step so far is not finite; of this rank

    def others(self, shards: Sequence[Shard]) -> list[Shard]:
        """Shards that are updated at the step's end."""
        dense = set(self.parameters)
        return [shard for shard in shards if shard.whole not in dense]

    def passes(self, batch: DeviceBatch, hyper: Hyper, optimizer: torch.optim.Optimizer) -> Sums:
        """Forward and backward of this rank's samples of the step, and the updates of the dense part. A collective.

        Leaves in all other parameters the gradient of the sum of own losses / weight of the global batch.
        """
        x, sums = self._forward.inputs_of(batch), zero_sums(self._forward.task.sums)
        self.bad = torch.zeros((), dtype=torch.bool, device=x.device)
        self._stopwatch.enter("forward")
        autocast = functools.partial(self._forward.precision.autocast, x.device)
        for number, turn in enumerate(self._model.turns(x, self._updates, autocast)):
            losses = self._forward.losses(turn.outputs, samples_of(batch, turn.rows), training=True)
            sums = add_sums(sums, losses.sums)
            self._stopwatch.enter("backward")
            weight = turn.samples * self._sample_weight
            (losses.total / weight * self._scale.scale(one_or_nan(losses.total))).backward()
            self._stopwatch.enter("update")
            lr = turn_learning_rate(hyper.lr, turn.samples, hyper.batch)
            self._update(hyper._replace(lr=lr, step=hyper.step * self._updates + number), optimizer)
            self._stopwatch.enter("forward" if number < self._updates - 1 else "backward")  # of the convolutions, behind the last turn
        rule_optimizer.set_hyper(optimizer, hyper)
        return sums

    def _update(self, hyper: Hyper, optimizer: torch.optim.Optimizer) -> None:
        fill_missing(self.parameters)
        self._scale.unscale_(self.parameters)
        self.bad = self.bad | any_nonfinite(self.parameters)
        if not (self._leaves_out and self._strategy.total(self.bad.double()) > 0):  # the host waits for the device here
            clip_(self._shards, *self._clip, self._strategy.total)
            rule_optimizer.set_hyper(optimizer, hyper)
            optimizer.step()  # of the parameters that have a gradient: these alone
        for p in self.parameters:
            p.grad = None
