"""A step in torch: passes leave gradients, and an update takes them; for the trainer, a script's own loop and a dense part alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.learner import TimedPass, UnderWay, Waited
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.compile import keep_gradients
from hvdtrain.frameworks.torch.forward import Evaluated, Forward, Losses
from hvdtrain.frameworks.torch.gradients import Meter, NoMeter, add_noise_, any_nonfinite, clip_, one_or_nan
from hvdtrain.frameworks.torch.inputs import DeviceBatch
from hvdtrain.frameworks.torch.parallel.strategy import OnePass, Shard, Strategy
from hvdtrain.frameworks.torch.precision import Scale


class Update:
    """The end of a step, from gradients that are the sum over ranks: they are unscaled, left out where they are not finite, clipped, given
    noise, and the optimizer makes its step.
    """

    def __init__(
        self,
        config: Config,
        optimizer: torch.optim.Optimizer,
        strategy: Strategy,
        shards: Sequence[Shard],
        scale: Scale,
        restore: Callable[[], None],
        step: Callable[[torch.optim.Optimizer], None] | None = None,
    ) -> None:
        """shards: whose gradients are taken. restore: makes buffers what they were, where a step is left out. step: in the place of
        Strategy.optimizer_step().
        """
        self._optimizer, self._strategy, self._scale, self._restore = optimizer, strategy, scale, restore
        self._shards, self._parameters = shards, [shard.parameter for shard in shards]
        self._clip = config.optim.clip_norm, config.optim.clip_value
        self._skips_nonfinite = config.guard.nonfinite == "skip"
        self._step = step or strategy.optimizer_step

    def unscaled_are_bad(self) -> torch.Tensor:
        """Divides every gradient by the loss scale. () bool, whether any number of this rank's is not finite: clipping would hide it."""
        self._scale.unscale_(self._parameters)
        return any_nonfinite(self._parameters)

    def anywhere(self, bad: torch.Tensor) -> torch.Tensor:
        """() bool, whether it is so on any rank that updates another part. A collective where there are such ranks."""
        return self._strategy.total(bad.double()) > 0

    def apply(self, noise: float = 0.0, seed: int = 0) -> None:
        """Clips, adds noise, and makes the optimizer's step. A collective where the strategy's is."""
        clip_(self._shards, *self._clip, self._strategy.total)
        add_noise_(self._shards, noise, seed)
        self._step(self._optimizer)

    def make(self, bad: torch.Tensor, noise: float = 0.0, seed: int = 0, measure: Callable[[torch.Tensor], Sums] = lambda bad: {}) -> Sums:
        """All that follows unscaled_are_bad(), whose result is `bad`. Clears the gradients.

        measure: called before they are clipped, with what anywhere() says. Returns what it does, and "nonfinite": ranks with the same
        gradient each report a share, so that the sum over ranks counts the step once.
        """
        bad = self.anywhere(bad)
        overflowed = self._scale.update(bad)
        sums: Sums = {"nonfinite": bad.double() * (not overflowed) / self._strategy.equal_ranks}
        sums |= measure(bad)
        if overflowed or (self._skips_nonfinite and bad):  # the host waits for the device here
            self._restore()
        else:
            self.apply(noise, seed)
        self._optimizer.zero_grad()
        return sums


class Passes:
    """The forward and backward passes of a step, one micro-batch after the other, and those of an evaluation.

    This class makes them as one process does. Others say what they do differently: through stages, in turns.
    """

    def __init__(
        self,
        config: Config,
        forward: Forward,
        scale: Scale,
        stopwatch: Stopwatch,
        parameters: Sequence[torch.nn.Parameter],
        meter: Meter | NoMeter,
    ) -> None:
        """parameters: those that are trained. meter: of the gradient noise scale."""
        self._forward, self._scale, self._stopwatch, self._meter = forward, scale, stopwatch, meter
        self._compile, self._parameters = config.speed.compile, list(parameters)

    def updated_after(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """The shards that the step's end updates: all, unless passes update some."""
        return shards

    def of_step(self, hyper: Hyper, optimizer: torch.optim.Optimizer) -> OnePass:
        """What Strategy.run() calls in this step."""
        return self._one

    def left_bad(self, bad: torch.Tensor) -> torch.Tensor:
        """() bool, whether `bad`, or a gradient that the passes of this step have used up was not finite."""
        return bad

    def _one(self, batch: DeviceBatch, divisor: int, is_last: bool) -> Sums:
        """Forward and backward of one micro-batch: adds to p.grad the gradient of (sum of its losses) / divisor."""
        if is_last:
            self._meter.last_pass()
        self._stopwatch.enter("forward")
        losses = self._forward.train(batch)
        self._stopwatch.enter("backward")
        self._scaled(losses, divisor).backward()
        if not is_last:
            keep_gradients(self._compile, self._parameters)
        return losses.sums

    def _scaled(self, losses: Losses, divisor: int) -> torch.Tensor:
        """What backward() begins with: NaN where a loss is not finite."""
        return losses.total / divisor * self._scale.scale(one_or_nan(losses.total))

    def evaluate(self, batch: DeviceBatch) -> Sums:
        """The sums of Learner.evaluate(); gradients are off, and the model is in evaluation mode."""
        return self._forward.evaluate(batch).sums

    def predict(self, batch: DeviceBatch) -> Evaluated:
        """The sums with the outputs. Raises UserError where this rank has none."""
        return self._forward.evaluate(batch)

    # Of a pipeline, as Learner has them.

    def read_waited(self) -> Waited | None:
        return None

    def last_passes(self) -> list[TimedPass]:
        return []

    def under_way(self) -> UnderWay | None:
        return None
