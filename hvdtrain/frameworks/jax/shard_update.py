"""The update of one rank's part of the weights, as pure functions which the JAX framework compiles, between sums over ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import part_of
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.jax.step import Weights
from hvdtrain.frameworks.jax.update import Optimizer, OptimizerState, noise
from hvdtrain.optim.clipping import clip
from hvdtrain.optim.rule import ArrayOps


class Cut:
    """A rank's part of all parameters in one row, and what it has of each of them: a range of its elements, maybe an empty one."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], rank: int, size: int) -> None:
        sizes = [math.prod(shape) for shape in shapes]
        self.shapes, self.length = list(shapes), sum(sizes)
        self.ends = np.cumsum(sizes)[:-1].tolist()  # of the parameters in the row, without the last
        self.own = part_of(self.length, rank, size)
        begins = [0, *self.ends]
        self.ranges = [
            slice(*np.clip([self.own.start - at, self.own.stop - at], 0, n).tolist()) for at, n in zip(begins, sizes, strict=True)
        ]
        self.lengths = [range_.stop - range_.start for range_ in self.ranges]

    def of(self, arrays: Sequence[Any]) -> list[Any]:
        """(n,) of each parameter's array."""
        return [array.reshape(-1)[own] for array, own in zip(arrays, self.ranges, strict=True)]


class ShardUpdate:
    """One step of a rank's part. The results of gradient_sums() and norm_sums() are added up over ranks before the next function."""

    def __init__(self, config: Config, optimizer: Optimizer, cut: Cut) -> None:
        self.optim, self.optimizer, self.cut = config.optim, optimizer, cut

    def gradient_sums(self, part: jax.Array) -> jax.Array:
        """(3,): whether a number of the mean gradient is not finite, its squared norm for clipping, and without clipping by value."""
        squares = [jnp.zeros((), part.dtype)]

        def keep(square: jax.Array) -> jax.Array:
            squares.append(square)
            return square

        clip([part], self.optim.clip_norm, self.optim.clip_value, jnp, keep)
        bad = ~jnp.isfinite(part).all()
        return jnp.stack([bad.astype(part.dtype), squares[-1], jnp.vdot(part, part)])

    def norm_sums(
        self, weights: Weights, optimizer_state: OptimizerState, part: jax.Array, square: Any, hyper: Hyper, key: Any, noisy: bool
    ) -> jax.Array:
        """(n,): the squares of the norms that the rule takes of its arrays, in its order; n is 0 where it takes none."""
        ops = LocalSquares()
        self._apply(weights, optimizer_state, part, square, hyper, key, noisy, ops)
        return jnp.stack([jnp.zeros((), part.dtype), *ops.squares])[1:]

    def update(
        self,
        weights: Weights,
        optimizer_state: OptimizerState,
        part: jax.Array,
        square: Any,
        squares: Any,
        hyper: Hyper,
        key: Any,
        noisy: bool,
    ) -> tuple[jax.Array, OptimizerState]:
        """This rank's part of the new weights in one row, and its new state. square, squares: the sums over ranks."""
        new_weights, new_state = self._apply(weights, optimizer_state, part, square, hyper, key, noisy, GivenSquares(squares))
        return jnp.concatenate(new_weights), new_state

    def _apply(
        self,
        weights: Weights,
        optimizer_state: OptimizerState,
        part: jax.Array,
        square: Any,
        hyper: Hyper,
        key: Any,
        noisy: bool,
        ops: ArrayOps,
    ) -> tuple[Weights, OptimizerState]:
        (clipped,) = clip([part], self.optim.clip_norm, self.optim.clip_value, jnp, lambda _: square)
        if noisy:
            clipped = clipped + noise(hyper, key, jax.ShapeDtypeStruct((self.cut.length,), part.dtype))[self.cut.own]
        gradients = jnp.split(clipped, np.cumsum(self.cut.lengths)[:-1])
        return self.optimizer.apply(gradients, optimizer_state, self.cut.of(weights), hyper, ops)


class LocalSquares(ArrayOps):
    """Keeps the squared norms of this rank's parts.

    The norms themselves are not known yet: each is NaN, which no square depends on (optim/rule.py).
    """

    def __init__(self) -> None:
        super().__init__(jnp)
        self.squares: list[jax.Array] = []

    def norm(self, x: Any) -> Any:
        self.squares.append((x * x).sum())
        return jnp.full((), jnp.nan, x.dtype)


class GivenSquares(ArrayOps):
    """The norm of an array of which each rank has a part is that of all parts; the sums of squares are in the order of the calls."""

    def __init__(self, squares: Any) -> None:
        super().__init__(jnp)
        self._squares = iter(squares)

    def norm(self, x: Any) -> Any:
        return jnp.sqrt(next(self._squares))
