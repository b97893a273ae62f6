"""The update of all weights, as pure functions of weights, optimizer state and gradient, which the JAX framework compiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.jax.model import key_of
from hvdtrain.frameworks.jax.step import Weights
from hvdtrain.optim.clipping import clip
from hvdtrain.optim.rule import ArrayOps, Ops, Rule, is_excluded

OptimizerState = list[tuple[Any, ...]]  # of each parameter, in the order of Model.names


class Optimizer:
    """A rule for all parameters of a model, of which some neither decay nor adapt."""

    def __init__(self, config: Config, rule: Rule, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = list(shapes)
        self._excluded = [config.optim.exclude == "norms_and_biases" and is_excluded(shape) for shape in shapes]
        self._rules = [rule.of_parameter(*each) for each in zip(names, shapes, self._excluded, strict=True)]

    def start(self, weights: Sequence[Any]) -> OptimizerState:
        """The state before the first step, for each array of `weights`."""
        return [rule.init(p, ArrayOps(jnp)) for rule, p in zip(self._rules, weights, strict=True)]

    def apply(
        self, gradients: Sequence[Any], optimizer_state: OptimizerState, weights: Weights, hyper: Hyper, ops: Ops
    ) -> tuple[Weights, OptimizerState]:
        """New weights and state of every parameter, or of one part of each."""
        new_weights: Weights = []
        new_states: OptimizerState = []
        for rule, excluded, g, state, p in zip(self._rules, self._excluded, gradients, optimizer_state, weights, strict=True):
            new_p, new_state = rule.update(g, state, p, hyper._replace(weight_decay=0.0) if excluded else hyper, ops)
            new_weights.append(new_p.astype(p.dtype))  # the dtypes stay as they were, or the next step would be compiled again
            new_states.append(tuple(jnp.asarray(new).astype(old.dtype) for new, old in zip(new_state, state, strict=True)))
        return new_weights, new_states


def noise(hyper: Hyper, key: Any, like: Any) -> jax.Array:
    """Normal noise for the gradients of all parameters in one row: the same on every rank."""
    return jnp.sqrt(hyper.noise) * jax.random.normal(key_of(key), like.shape, like.dtype)


class Update:
    """The update of every parameter."""

    def __init__(self, config: Config, optimizer: Optimizer, ranks: int) -> None:
        self.config, self.optimizer, self.ranks = config, optimizer, ranks

    def update(
        self, weights: Weights, optimizer_state: OptimizerState, row: Any, hyper: Hyper, key: Any, noisy: bool
    ) -> tuple[Weights, OptimizerState, jax.Array]:
        """One step along the mean gradient over all ranks, in one row, and this rank's part of "nonfinite".

        `noisy` is a constant of the compiled function.
        """
        optim = self.config.optim
        bad = ~jnp.isfinite(row).all()
        gradients = clip(_split(row, weights), optim.clip_norm, optim.clip_value, jnp)
        if noisy:
            gradients = [g + part for g, part in zip(gradients, _split(noise(hyper, key, row), weights), strict=True)]
        new = self.optimizer.apply(gradients, optimizer_state, weights, hyper, ArrayOps(jnp))
        if self.config.guard.nonfinite == "skip":
            new = jax.tree.map(functools.partial(jnp.where, bad), (weights, optimizer_state), new)
        return *new, bad.astype(weights[0].dtype) / self.ranks


def _split(row: Any, weights: Weights) -> list[jax.Array]:
    """The row as an array for each parameter, in its shape."""
    cuts = np.cumsum([p.size for p in weights])[:-1]
    return [part.reshape(p.shape) for part, p in zip(jnp.split(row, cuts), weights, strict=True)]
