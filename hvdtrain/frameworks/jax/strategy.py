"""JaxStrategy: how ranks reduce gradients and which weights each rank updates. In Replicated, every
rank updates all weights."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Piece
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.jax.model import JaxDevice, JaxModel, key_data
from hvdtrain.frameworks.jax.step import (
    AnyOptimizer,
    OptimizerState,
    OptimizerUpdate,
    Phases,
    Weights,
)


class Squares(NamedTuple):
    """Squared norms, for the noise scale."""

    own: Any  # squared norm of the gradient over this rank's samples
    mean: Any  # squared norm of the mean gradient over all ranks


class Updated(NamedTuple):
    """The result of a step."""

    weights: Weights
    nonfinite: Any  # this rank's part of "nonfinite"
    squares: Squares | None  # only with log.noise_scale


class JaxStrategy(Protocol):
    """Sums gradients over ranks and applies the optimizer, whose state it holds.

    The losses of a step are first divided by the weight of the global batch, so that the sum over
    ranks is its mean. Every method is called on every rank: add() for each micro-batch of a step,
    then update().
    """

    summary: str  # part of the line that describes the learner
    is_sharded: bool  # this rank has a part of the optimizer state
    optimizer_state: OptimizerState

    def start_weights(self, start: list[np.ndarray]) -> Weights:
        """Returns this rank's part of the weights on the device, from full weights on the host."""

    def add(self, gradient: jax.Array | None) -> None:
        """Adds the gradient of a micro-batch, all parameters in one row; None if it has no samples.
        May be a collective.

        Called inside of JaxDevice.enable_x64().
        """

    def update(self, weights: Weights, hyper: Hyper, seed: int) -> Updated:
        """Makes one step along the sum of the added gradients over all ranks. `weights` must not be
        used again. A collective."""

    def put_together(self, parts: Weights) -> Weights:
        """Gathers whole arrays from arrays of the optimizer state, one for each parameter. May be a
        collective."""

    def weight(self, name: str, parameter: int, array: jax.Array) -> Piece:
        """Returns this rank's piece of a parameter, called `name` in the state."""

    def piece(self, name: str, parameter: int, array: jax.Array) -> Piece:
        """Returns this rank's piece of an array of a parameter's optimizer state, called `name` in
        the state."""


class Replicated:
    """Weights and state are replicated, all ranks make the same step, and gradients are reduced in
    one allreduce."""

    is_sharded = False

    def __init__(
        self,
        config: Config,
        model: JaxModel,
        optimizer: AnyOptimizer,
        communicator: Communicator,
        target: JaxDevice,
        phases: Phases,
    ) -> None:
        self._communicator = communicator
        self._target = target
        self._phases = phases
        self._measures = config.log.measures_noise
        self.summary = "gradients by one allreduce" if communicator.size > 1 else "no reduction"
        update = OptimizerUpdate(config, optimizer, communicator.size).update
        self._update = jax.jit(
            update, static_argnames="noisy", donate_argnums=(0, 1), out_shardings=target.everywhere
        )
        self.optimizer_state = start_state(optimizer, model.start, target)
        self._length = sum(p.size for p in model.start)
        self._row: jax.Array | None = None  # the gradients so far

    def start_weights(self, start: list[np.ndarray]) -> Weights:
        return [self._target.to_device(p) for p in start]

    def add(self, gradient: jax.Array | None) -> None:
        if gradient is not None:
            self._row = gradient if self._row is None else self._row + gradient

    def update(self, weights: Weights, hyper: Hyper, seed: int) -> Updated:
        row = self._row
        self._row = None
        if row is None:
            row = self._target.to_device(np.zeros(self._length, self._target.dtype))
        mean = self._mean(row)
        self._phases.enter("update")
        with jax.enable_x64(True):
            # so that a rule's numbers (1 - beta^t) are float64, as in Python; arrays keep their
            # dtypes
            weights, self.optimizer_state, nonfinite = self._update(
                weights, self.optimizer_state, mean, hyper, key_data(seed), noisy=hyper.noise > 0
            )
        squares = None
        if self._measures:  # before clipping and noise
            with self._target.enable_x64():
                squares = Squares(jnp.vdot(row, row), jnp.vdot(mean, mean))
        return Updated(weights, nonfinite, squares)

    def _mean(self, row: jax.Array) -> Any:
        """Returns the sum over ranks."""
        if self._communicator.size == 1:
            self._phases.wait_for(row)
            return row
        on_host = np.asarray(row)  # the host waits for the device here
        self._phases.enter("communication")
        return self._communicator.allreduce(on_host, "gradient.0")

    def put_together(self, parts: Weights) -> Weights:
        return parts

    def weight(self, name: str, parameter: int, array: jax.Array) -> Piece:
        return whole_piece(name, array)

    def piece(self, name: str, parameter: int, array: jax.Array) -> Piece:
        return whole_piece(name, array)


def whole_piece(name: str, array: jax.Array) -> Piece:
    """Returns the piece of a replicated array. For an array on a GPU, JAX keeps the host copy as
    long as the array."""
    return Piece(
        name,
        array.shape,
        0,
        array.size,
        np.dtype(array.dtype),
        functools.partial(np.asarray, array),
        True,
    )


def start_state(
    optimizer: AnyOptimizer, weights: list[np.ndarray], target: JaxDevice
) -> OptimizerState:
    """Returns the optimizer state before the first step, on the device, for weights or parts of
    them."""
    with target.enable_x64():
        return [
            tuple(target.to_device(np.array(array)) for array in state)
            for state in optimizer.start(weights)
        ]
