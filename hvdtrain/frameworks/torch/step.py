"""A step in torch: passes compute gradients, and an update measures, clips and applies them; for
the trainer, custom loops and the dense part."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.learner import CurrentPass, TimedPass, Waited
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.device import keep_gradients
from hvdtrain.frameworks.torch.forward import Evaluated, Forward, Losses
from hvdtrain.frameworks.torch.inputs import DeviceBatch
from hvdtrain.frameworks.torch.precision import Scale
from hvdtrain.frameworks.torch.strategy import OnePass, Shard, Strategy
from hvdtrain.optim.clip import clip

Total = Callable[[torch.Tensor], torch.Tensor]  # Strategy.total


class StepAddition:
    """The hooks of a feature in a step, in this order; the base class does nothing."""

    def take_parts(self, updated: Sequence[torch.Tensor]) -> None:
        """Takes the shards that this rank updates, one for each trained parameter, in their order.
        Called before the first step and after ranks were lost."""

    def begin_step(self, hyper: Hyper) -> None:
        """Called before the model is switched to training mode."""

    def last_pass(self) -> None:
        """Announces that the next backward completes the gradients of all the rank's samples of the
        step."""

    def reduced(self) -> None:
        """Called when p.grad is the sum over ranks."""

    def read(self, hyper: Hyper, count: int, shards: Sequence[Shard], total: Total) -> Sums:
        """Returns measurements of the mean gradient in the shards, as device scalars; count:
        samples of this rank."""
        return {}


class OptimizerStep:
    """The end of a step, from gradients summed over ranks: unscales them, skips the step if they
    are not finite, clips, adds noise, and runs the optimizer.
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
        """shards: whose gradients are used. restore: restores the buffers if a step is skipped.
        step: used instead of Strategy.optimizer_step().
        """
        self._optimizer = optimizer
        self._strategy = strategy
        self._scale = scale
        self._restore = restore
        self._shards = shards
        self._parameters = [shard.parameter for shard in shards]
        self._clip = config.optim.clip_norm, config.optim.clip_value
        self._skips_nonfinite = config.guard.nonfinite == "skip"
        self.may_leave_out = self._skips_nonfinite or bool(scale.tensors)  # a step
        self._step = step or strategy.optimizer_step

    def unscaled_are_bad(self) -> torch.Tensor:
        """Divides every gradient by the loss scale. Returns () bool, whether any of this rank's
        gradients is not finite, which clipping would hide."""
        self._scale.unscale_(self._parameters)
        return any_nonfinite(self._parameters)

    def anywhere(self, bad: torch.Tensor) -> torch.Tensor:
        """Returns () bool, whether `bad` is true on any rank that updates another part. A
        collective if there are such ranks."""
        return self._strategy.total(bad.double()) > 0

    def apply(self, noise: float = 0.0, seed: int = 0) -> None:
        """Clips gradients, adds noise, and makes the optimizer's step. A collective if the
        strategy's step is a collective."""
        clip_(self._shards, *self._clip, self._strategy.total)
        add_noise_(self._shards, noise, seed)
        self._step(self._optimizer)

    def make(
        self,
        bad: torch.Tensor,
        hyper: Hyper | None = None,
        seed: int = 0,
        measure: Callable[[torch.Tensor], Sums] = lambda bad: {},
    ) -> Sums:
        """Does everything that follows unscaled_are_bad(), whose result is `bad`, and clears the
        gradients.

        hyper: has the variance of the noise; None: no noise. measure: called before clipping with
        the result of anywhere(). Returns the sums of `measure`, and "nonfinite": ranks with the
        same gradient each report a share, so that the sum over ranks counts the step once.
        """
        bad = self.anywhere(bad)
        overflowed = self._scale.update(bad)
        if isinstance(overflowed, torch.Tensor):
            overflowed = overflowed.to(bad.device)
        counts = bad & (bad ^ overflowed)  # bad, and no overflow
        sums: Sums = {"nonfinite": counts.double() / self._strategy.equal_ranks}
        sums |= measure(bad)
        left_out = bad | overflowed if self._skips_nonfinite else overflowed
        if left_out:  # the host waits for the device here, once, unless it already has the value
            self._restore()
        else:
            self.apply(hyper.noise if hyper else 0.0, seed)
        self._optimizer.zero_grad()
        return sums


class Passes:
    """The forward and backward passes of a step, one micro-batch after the other, and those of an
    evaluation.

    The base class runs them on a whole model; subclasses run them through stages or in turns.
    """

    def __init__(
        self,
        config: Config,
        forward: Forward,
        scale: Scale,
        stopwatch: Stopwatch,
        parameters: Sequence[torch.nn.Parameter],
        additions: Sequence[StepAddition],
    ) -> None:
        """parameters: the trained parameters."""
        self._forward = forward
        self._scale = scale
        self._stopwatch = stopwatch
        self._additions = additions
        self._compile = config.speed.compile
        self._parameters = list(parameters)

    def updated_after(self, shards: Sequence[Shard]) -> Sequence[Shard]:
        """Returns the shards that the step's end updates: all, unless passes update some."""
        return shards

    def of_step(self, hyper: Hyper, optimizer: torch.optim.Optimizer) -> OnePass:
        """Returns the function that Strategy.run() calls in this step."""
        return self._one

    def left_bad(self, bad: torch.Tensor) -> torch.Tensor:
        """Returns () bool, whether `bad`, or a gradient that the passes of this step have used up
        was not finite."""
        return bad

    def _one(self, batch: DeviceBatch, divisor: float, is_last: bool) -> Sums:
        """Runs forward and backward of one micro-batch: adds the gradient of (sum of its losses) /
        divisor to p.grad."""
        if is_last:
            for addition in self._additions:
                addition.last_pass()
        self._stopwatch.enter("forward")
        losses = self._forward.train(batch)
        self._stopwatch.enter("backward")
        self._scaled(losses, divisor).backward()
        if not is_last:
            keep_gradients(self._compile, self._parameters)
        return losses.sums

    def _scaled(self, losses: Losses, divisor: float) -> torch.Tensor:
        """Returns the scalar on which to call backward(): NaN if a loss is not finite."""
        return losses.total / divisor * self._scale.scale(one_or_nan(losses.total))

    def evaluate(self, batch: DeviceBatch) -> Sums:
        """Returns the sums of Learner.evaluate(); gradients are off, and the model is in evaluation
        mode."""
        return self._forward.evaluate(batch).sums

    def predict(self, batch: DeviceBatch) -> Evaluated:
        """Returns the sums with the outputs. Raises UserError if this rank has no outputs."""
        return self._forward.evaluate(batch)

    # Of a pipeline, as Learner has them.

    def read_waited(self) -> Waited | None:
        return None

    def last_passes(self) -> list[TimedPass]:
        return []

    def under_way(self) -> CurrentPass | None:
        return None


def clip_(shards: Sequence[Shard], norm: float | None, value: float | None, total: Total) -> None:
    """Clips all gradients like clip() of optim/rule.py; None: no clipping."""
    if norm is not None or value is not None:
        parameters = [shard.parameter for shard in shards]
        for p, g in zip(
            parameters, clip([p.grad for p in parameters], norm, value, torch, total), strict=True
        ):
            p.grad = g


def add_noise_(shards: Sequence[Shard], variance: float, seed: int) -> None:
    """Adds normal noise with this variance to each number of the gradients. The seed is the same on
    every rank, so a parameter gets the same noise on every rank."""
    if variance:
        generator: Any = torch.Generator(shards[0].parameter.device).manual_seed(seed & (2**63 - 1))
        for shard in shards:
            g = shard.parameter.grad
            assert g is not None
            noise = (
                torch.empty_like(g)
                if shard.is_whole
                else torch.empty(shard.shape, dtype=g.dtype, device=g.device)
            )
            noise.normal_(0.0, variance**0.5, generator=generator)
            g += noise if shard.is_whole else shard.take(noise).view(g.shape)


def one_or_nan(loss: torch.Tensor) -> torch.Tensor:
    """Returns a factor for the loss: 1, or NaN if the loss is not finite. Then the gradients become
    NaN, after the reduction on every rank.

    It is a factor because passing it to backward() would import sympy to check its shape, which
    takes half a second. A clamp between the last parameter and the loss would keep NaN from the
    parameters.
    """
    # torch.where(..., 1.0, nan) would copy both numbers to the device, and wait
    return loss.detach() * 0.0 + 1.0


def any_nonfinite(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Whether any number of p.grad is NaN or infinite: () bool. Of each number by itself: a norm of
    finite ones may overflow."""
    gradients = [
        p.grad._values() if p.grad.is_sparse else p.grad for p in parameters if p.grad is not None
    ]
    nonempty = [g for g in gradients if g.numel()]  # aminmax of no numbers is an error
    if not nonempty:
        return torch.zeros((), dtype=torch.bool, device=parameters[0].device)
    if nonempty[0].device.type == "cpu":
        # a fifth to a twentieth of the time of _foreach_norm
        extremes = [extreme for g in nonempty for extreme in torch.aminmax(g)]
    else:
        # few kernels for all tensors; a NaN in any of them gives NaN
        extremes = list(torch._foreach_norm(nonempty, math.inf))
    return ~torch.stack(extremes).isfinite().all()


def zero_where(bad: torch.Tensor, sums: Sums) -> Sums:
    """Returns the sums as device scalars, all 0 if `bad`, () bool, is true. `bad` may be in host
    memory (offloaded gradients)."""
    found = {name: (~bad).double() * value for name, value in sums.items()}
    return {name: value.masked_fill(bad.to(value.device), 0.0) for name, value in found.items()}
