"""A step in JAX: loss, gradient and update as compiled pure functions of weights and batches; and
the timing of phases."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.images.averaging import Averaging
from hvdtrain.frameworks.jax.layers import Params
from hvdtrain.frameworks.jax.model import ForwardPass, JaxModel, key_of
from hvdtrain.frameworks.jax.parts import in_one_row
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.optim.clip import clip
from hvdtrain.optim.rule import ArrayOps, Ops, Rule, is_excluded
from hvdtrain.tasks.task import Each, TaskPart, counts_exactly

Weights = list[jax.Array]  # in the order of JaxModel.names
OptimizerState = list[tuple[Any, ...]]  # state of each parameter, in the order of JaxModel.names


class PaddedBatch(NamedTuple):
    """A micro-batch on the device: n samples, then padding with weight "w" 0. Without samples it
    has no arrays, or one row."""

    n: int
    weight: float = 0  # the sum of Task.weight()
    # (rows, ...) each: the fields, augmented, images as uint8, other integers as int32; "w" of the
    # samples' losses; "mixup_weight" of a sample in its mixture, and the fields of its partner, as
    # "partner_y"
    arrays: dict[str, jax.Array] = {}  # noqa: RUF012 (never written)


class Gradient(NamedTuple):
    """The result of a pass of a micro-batch."""

    # gradient of all parameters; with shard.stage=3, this rank's part of the sum over ranks
    row: jax.Array
    sums: Sums
    buffers: Params  # after it


class Formulas:
    """Loss and gradient. Batches that reach them have rows."""

    def __init__(self, model: JaxModel, part: TaskPart, averaging: Averaging) -> None:
        self.model = model
        self.part = part
        self.averaging = averaging

    def sums(self, weights: Weights, buffers: Params, batch: PaddedBatch) -> Sums:
        """Returns the sums in evaluation."""
        each = self.part.each(self.outputs(weights, buffers, batch), batch.arrays, False)
        return _sums(each, batch.n, counts_exactly(self.part))

    def outputs(self, weights: Weights, buffers: Params, batch: PaddedBatch) -> jax.Array:
        """Returns the outputs (rows, ...) in evaluation: the mean over the views of each sample."""

        def of_view(arrays: Mapping[str, jax.Array]) -> jax.Array:
            return self.model.outputs(weights, buffers, self.part.inputs(arrays))[0]

        outputs: jax.Array = self.averaging.mean(batch.arrays, of_view, jnp)
        return outputs

    def gradient(
        self, weights: Weights, buffers: Params, batch: PaddedBatch, divisor: float, key: Any
    ) -> Gradient:
        """Returns the gradient of the sum of losses / `divisor`, in one row. key: data of a random
        key, for dropout.

        The row is NaN if the loss is not finite, which the reduction passes on to every rank.
        """
        gradients, (sums, changed, finite) = jax.grad(self.loss, has_aux=True)(
            weights, buffers, batch, divisor, key
        )
        return Gradient(
            jnp.where(finite, in_one_row(gradients), jnp.nan),
            sums,
            changed,
        )

    def loss(
        self, weights: Weights, buffers: Params, batch: PaddedBatch, divisor: Any, key: Any
    ) -> tuple[jax.Array, tuple[Sums, Params, jax.Array]]:
        """Returns the sum of losses / `divisor`, which adds up over ranks to the mean over the
        global batch; also sums, buffers, and whether all losses are finite.
        """
        outputs, changed = self.model.outputs(
            weights, buffers, self.part.inputs(batch.arrays), ForwardPass(key_of(key), batch.n)
        )
        each = self.part.each(outputs, batch.arrays, True)
        sample_weights = batch.arrays["w"]
        sums = _sums(each, batch.n)
        return (each.loss * sample_weights).sum() / divisor, (
            sums,
            changed,
            jnp.isfinite(sums["loss"] * sample_weights).all(),
        )


class LearnerPasses(Protocol):
    """The passes of a learner's model; the strategy defines the form of weights and of the
    gradient's row."""

    are_collective: bool  # every rank runs the same passes, even without samples

    def gradient(
        self, weights: Weights, buffers: Params, batch: PaddedBatch, divisor: float, key: np.ndarray
    ) -> Gradient:
        """Formulas.gradient()"""

    def sums(self, weights: Weights, buffers: Params, batch: PaddedBatch) -> Sums:
        """Formulas.sums()"""

    def outputs(self, weights: Weights, buffers: Params, batch: PaddedBatch) -> Any:
        """Formulas.outputs()"""

    def all_weights(self, weights: Weights) -> Weights:
        """Returns full arrays. May be a collective."""

    def release(self) -> None:
        """Called before the weights change."""


class WholePasses:
    """Passes that are one compiled function of full weights each."""

    are_collective = False

    def __init__(self, formulas: Formulas, place: jax.sharding.Sharding | None) -> None:
        """place: sharding of the results, if a rank has several devices."""
        compiled = functools.partial(jax.jit, out_shardings=place)
        self.gradient = compiled(formulas.gradient)
        self.sums = compiled(formulas.sums)
        self.outputs = compiled(formulas.outputs)

    def all_weights(self, weights: Weights) -> Weights:
        return weights

    def release(self) -> None:
        pass


def _sums(each: Each, samples: Any, exactly: bool = False) -> Sums:
    """Returns sums over samples, without weights and padding. exactly: integers remain integers."""
    real = jnp.arange(len(each.loss)) < samples

    def total(term: jax.Array) -> jax.Array:
        mask = real.reshape(-1, *(1,) * (term.ndim - 1))
        summed = jnp.where(mask, term, jnp.zeros((), term.dtype)).sum(0)
        return (
            summed
            if exactly and jnp.issubdtype(summed.dtype, jnp.integer)
            else summed.astype(each.loss.dtype)
        )

    return {
        "loss": jnp.where(real, each.loss, 0.0).sum(),
        **{name: total(term) for name, term in each.terms.items()},
    }


class OptimizerUpdate:
    """The update of every parameter."""

    def __init__(self, config: Config, optimizer: AnyOptimizer, ranks: int) -> None:
        self.config = config
        self.optimizer = optimizer
        self.ranks = ranks

    def update(
        self,
        weights: Weights,
        optimizer_state: OptimizerState,
        row: Any,
        hyper: Hyper,
        key: Any,
        noisy: bool,
    ) -> tuple[Weights, OptimizerState, jax.Array]:
        """Makes one step along the mean gradient over all ranks, in one row; also returns this
        rank's part of "nonfinite".

        `noisy` is a constant of the compiled function.
        """
        optim = self.config.optim
        bad = ~jnp.isfinite(row).all()
        gradients = clip(_split(row, weights), optim.clip_norm, optim.clip_value, jnp)
        if noisy:
            gradients = [
                g + part
                for g, part in zip(gradients, _split(noise(hyper, key, row), weights), strict=True)
            ]
        new = self.optimizer.apply(gradients, optimizer_state, weights, hyper, ArrayOps(jnp))
        if self.config.guard.nonfinite == "skip":
            new = jax.tree.map(functools.partial(jnp.where, bad), (weights, optimizer_state), new)
        return *new, bad.astype(weights[0].dtype) / self.ranks


class AnyOptimizer(Protocol):
    """The optimizer of a model: a rule of hvdtrain or a user's function."""

    shapes: list[tuple[int, ...]]

    @property
    def made_by(self) -> str:
        """The path of a user's function; empty for a rule."""

    def start(self, weights: Sequence[Any]) -> OptimizerState:
        """Returns the state before the first step: one entry for each array of `weights`, then
        possibly one for state that belongs to no parameter."""

    def apply(
        self,
        gradients: Sequence[Any],
        optimizer_state: OptimizerState,
        weights: Weights,
        hyper: Hyper,
        ops: Ops,
    ) -> tuple[Weights, OptimizerState]:
        """Returns new weights and state of every parameter, or of one part of each."""

    def state_names(self, optimizer_state: OptimizerState) -> list[list[str]]:
        """Returns the name of each array in a checkpoint."""


class Optimizer:
    """Applies one rule to all parameters of a model; some of them neither decay nor adapt."""

    made_by = ""

    def __init__(
        self, config: Config, rule: Rule, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> None:
        self.shapes = list(shapes)
        self._names = list(names)
        self._excluded = [
            config.optim.exclude == "norms_and_biases" and is_excluded(shape) for shape in shapes
        ]
        self._rules = [
            rule.of_parameter(*each) for each in zip(names, shapes, self._excluded, strict=True)
        ]

    def state_names(self, optimizer_state: OptimizerState) -> list[list[str]]:
        of_each = zip(self._names, optimizer_state, strict=True)
        return [[f"s.{name}.{i}" for i in range(len(state))] for name, state in of_each]

    def start(self, weights: Sequence[Any]) -> OptimizerState:
        return [rule.init(p, ArrayOps(jnp)) for rule, p in zip(self._rules, weights, strict=True)]

    def apply(
        self,
        gradients: Sequence[Any],
        optimizer_state: OptimizerState,
        weights: Weights,
        hyper: Hyper,
        ops: Ops,
    ) -> tuple[Weights, OptimizerState]:
        new_weights: Weights = []
        new_states: OptimizerState = []
        for rule, excluded, g, state, p in zip(
            self._rules, self._excluded, gradients, optimizer_state, weights, strict=True
        ):
            new_p, new_state = rule.update(
                g, state, p, hyper._replace(weight_decay=0.0) if excluded else hyper, ops
            )
            # the dtypes must not change, or the next step would be compiled again
            new_weights.append(new_p.astype(p.dtype))
            new_states.append(
                tuple(
                    jnp.asarray(new).astype(old.dtype)
                    for new, old in zip(new_state, state, strict=True)
                )
            )
        return new_weights, new_states


def noise(hyper: Hyper, key: Any, like: Any) -> jax.Array:
    """Returns normal noise for the gradients of all parameters in one row, the same on every
    rank."""
    return jnp.sqrt(hyper.noise) * jax.random.normal(key_of(key), like.shape, like.dtype)


def _split(row: Any, weights: Weights) -> list[jax.Array]:
    """Splits the row into an array for each parameter."""
    cuts = np.cumsum([p.size for p in weights])[:-1]
    return [part.reshape(p.shape) for part, p in zip(jnp.split(row, cuts), weights, strict=True)]


class Phases:
    """The phases of a step. JAX works asynchronously, so phases are timed where the host waits:
    before it communicates, or as requested by log.step_times."""

    def __init__(self, stopwatch: Stopwatch, communicates: bool, waits: bool) -> None:
        """waits: the host waits for the device at the end of each phase, to time it."""
        self._stopwatch = stopwatch
        self._waits = waits
        self.are_timed = waits or communicates

    def begin(self) -> None:
        """Ends the phase "data"."""
        self._stopwatch.enter("compute" if self.are_timed else "")

    def enter(self, phase: str) -> None:
        if self.are_timed:
            self._stopwatch.enter(phase)

    def wait_for(self, arrays: Any) -> None:
        if self._waits:
            jax.block_until_ready(arrays)
