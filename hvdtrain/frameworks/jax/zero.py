"""shard.stage in JAX: each rank holds the optimizer state of its part of all weights, and updates
only that part (ZeRO).

Source: Rajbhandari et al. 2020, arXiv:1910.02054.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Piece
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.jax.model import JaxDevice, JaxModel, key_data
from hvdtrain.frameworks.jax.parts import CutUnits, FlatShard
from hvdtrain.frameworks.jax.step import AnyOptimizer, OptimizerState, Phases, Weights, noise
from hvdtrain.frameworks.jax.strategy import Squares, Updated, start_state, whole_piece
from hvdtrain.optim.clip import clip
from hvdtrain.optim.rule import ArrayOps


class JaxZeroStrategy:
    """All weights in one row, or in stage 3 one row for each unit, partitioned over ranks.

    Each rank gets the sum over ranks of its part of the gradient and applies the optimizer to it;
    then the updated parts are gathered on all ranks. Stage 1 adds up the gradients of micro-batches
    first. Stage 2 reduces the gradient of each micro-batch and adds up the parts. jax.grad computes
    the gradient of all parameters at once, so a rank holds one full gradient, and a copy in host
    memory, during the reduction. In stage 3 a pass reduces its gradients itself (fully_sharded.py),
    and weights are parts here: (n,) of each parameter.
    """

    is_sharded = True

    def __init__(
        self,
        config: Config,
        model: JaxModel,
        optimizer: AnyOptimizer,
        communicator: Communicator,
        target: JaxDevice,
        phases: Phases,
        units: CutUnits | None = None,
        in_units: str = "",
    ) -> None:
        """units: of stage 3; in_units: describes them, for the summary."""
        self._communicator = communicator
        self._target = target
        self._phases = phases
        self._stage = config.shard.stage
        self._skips = config.guard.nonfinite == "skip"
        self._measures = config.log.measures_noise
        self._cut = cut = units or FlatShard(optimizer.shapes, communicator.rank, communicator.size)
        formulas = ShardUpdate(config, optimizer, cut)
        self._gradient_sums = jax.jit(formulas.gradient_sums)
        self._norm_sums = jax.jit(formulas.norm_sums, static_argnames="noisy")
        self._update = jax.jit(
            formulas.update, static_argnames="noisy", donate_argnums=(0, 1) if units else 1
        )
        self.optimizer_state = start_state(optimizer, cut.take(model.start), target)
        self._row: jax.Array | None = None  # stage 1: this rank's gradient so far
        self._part: jax.Array | None = None  # this rank's part of the sum over ranks so far
        self._own_square: Any = 0.0  # squared norm of this rank's gradient
        ranks = f"{communicator.size} rank{'s' if communicator.size > 1 else ''}"
        what = ("", "optimizer state", "optimizer state and gradients", "weights")[self._stage]
        self.summary = f"{what} sharded over {ranks}{in_units} (ZeRO stage {self._stage})"

    def start_weights(self, start: list[np.ndarray]) -> Weights:
        own = self._cut.take(start) if self._stage == 3 else start
        return [self._target.to_device(np.array(p)) for p in own]

    def add(self, gradient: jax.Array | None) -> None:
        if self._stage == 2:
            self._reduce(gradient)
        elif gradient is None:
            return
        elif self._stage == 3:
            self._part = gradient if self._part is None else self._part + gradient
        else:
            self._row = gradient if self._row is None else self._row + gradient

    def update(self, weights: Weights, hyper: Hyper, seed: int) -> Updated:
        if self._stage == 1:
            with self._target.enable_x64():
                self._reduce(self._row)
            self._row = None
        part = self._part
        self._part = None
        self._phases.enter("update")
        with jax.enable_x64(True):  # see Replicated.update()
            bad, square, mean_square = self._sum_over_ranks(
                self._gradient_sums(part), "shards.gradient"
            )
            if not (bad and self._skips):
                key = key_data(seed)
                noisy = hyper.noise > 0
                squares = self._norm_sums(
                    weights, self.optimizer_state, part, square, hyper, key, noisy=noisy
                )
                squares = self._sum_over_ranks(squares, "shards.norms")
                own, self.optimizer_state = self._update(
                    weights, self.optimizer_state, part, square, squares, hyper, key, noisy=noisy
                )
                weights = self._spread(own) if isinstance(self._cut, FlatShard) else own
        measured = Squares(self._own_square, mean_square) if self._measures else None
        return Updated(weights, bool(bad) / self._communicator.size, measured)

    def put_together(self, parts: Weights) -> Weights:
        return self._spread(parts) if isinstance(self._cut, FlatShard) else parts

    def weight(self, name: str, parameter: int, array: jax.Array) -> Piece:
        return self.piece(name, parameter, array) if self._stage == 3 else whole_piece(name, array)

    def piece(self, name: str, parameter: int, array: jax.Array) -> Piece:
        own = self._cut.ranges[parameter]
        whole = whole_piece(name, array)
        if array.ndim == 0:  # a number for the parameter, which every rank has
            return whole
        return whole._replace(
            shape=self._cut.shapes[parameter],
            start=own.start,
            stop=own.stop,
            is_whole=False,
            is_mine=True,
        )

    def _reduce(self, row: jax.Array | None) -> None:
        """Adds this rank's part of the sum over ranks of a gradient."""
        if self._measures:
            self._own_square = 0.0 if row is None else jnp.vdot(row, row)
        # the host waits for the device here
        on_host = np.zeros(self._cut.length, self._target.dtype) if row is None else np.asarray(row)
        self._phases.enter("communication")
        part = self._communicator.start_reduce_scatter(on_host, "gradient.0").wait()
        self._phases.enter("compute")
        # a copy, because it may be a view of the whole array
        part = self._target.to_device(np.array(part))
        self._part = part if self._part is None else self._part + part

    def _sum_over_ranks(self, x: jax.Array, name: str) -> np.ndarray:
        """Returns the sum over ranks, (n,); nothing is sent if n is 0."""
        on_host = np.asarray(x)
        self._phases.enter("communication")
        total: np.ndarray = self._communicator.allreduce(on_host, name) if len(on_host) else on_host
        self._phases.enter("update")
        return total

    def _spread(self, own: Weights) -> Weights:
        """Gathers all weights from the parts of the ranks."""
        assert isinstance(self._cut, FlatShard)
        # new: the weights on a CPU may be views of it
        row = np.empty(self._cut.length, self._target.dtype)
        np.concatenate([np.asarray(part).reshape(-1) for part in own], out=row[self._cut.own])
        self._phases.enter("communication")
        row = self._communicator.start_spread(row, "weights.0").wait()
        self._phases.enter("update")
        return [self._target.to_device(array) for array in self._cut.split(row)]


class ShardUpdate:
    """One step of a rank's part. The results of gradient_sums() and norm_sums() are added up over
    ranks before the next function."""

    def __init__(self, config: Config, optimizer: AnyOptimizer, cut: FlatShard | CutUnits) -> None:
        self.optim = config.optim
        self.optimizer = optimizer
        self.cut = cut

    def gradient_sums(self, part: jax.Array) -> jax.Array:
        """Returns (3,): whether a number of the mean gradient is not finite, its squared norm for
        clipping, and the squared norm without clipping by value."""
        squares = [jnp.zeros((), part.dtype)]

        def keep(square: jax.Array) -> jax.Array:
            squares.append(square)
            return square

        clip([part], self.optim.clip_norm, self.optim.clip_value, jnp, keep)
        bad = ~jnp.isfinite(part).all()
        return jnp.stack([bad.astype(part.dtype), squares[-1], jnp.vdot(part, part)])

    def norm_sums(
        self,
        weights: Weights,
        optimizer_state: OptimizerState,
        part: jax.Array,
        square: Any,
        hyper: Hyper,
        key: Any,
        noisy: bool,
    ) -> jax.Array:
        """Returns (n,), the squared norms that the rule needs, in its order; n is 0 if it needs
        none."""
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
    ) -> tuple[Weights, OptimizerState]:
        """Returns this rank's parts of the new weights, and its new state. square, squares: sums
        over ranks."""
        return self._apply(
            weights, optimizer_state, part, square, hyper, key, noisy, GivenSquares(squares)
        )

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
        (clipped,) = clip(
            [part], self.optim.clip_norm, self.optim.clip_value, jnp, lambda _: square
        )
        if noisy:
            clipped = clipped + self.cut.of_row(
                noise(hyper, key, jax.ShapeDtypeStruct((self.cut.length,), part.dtype))
            )
        gradients = jnp.split(clipped, np.cumsum(self.cut.lengths)[:-1])
        own = self.cut.take(weights) if isinstance(self.cut, FlatShard) else weights
        return self.optimizer.apply(gradients, optimizer_state, own, hyper, ops)


class LocalSquares(ArrayOps):
    """Keeps the squared norms of this rank's parts.

    The norms are not known yet. Each is NaN, and no square depends on it (optim/rule.py).
    """

    def __init__(self) -> None:
        super().__init__(jnp)
        self.squares: list[jax.Array] = []

    def norm(self, x: Any) -> Any:
        self.squares.append((x * x).sum())
        return jnp.full((), jnp.nan, x.dtype)


class GivenSquares(ArrayOps):
    """Computes norms of arrays that are sharded over ranks, from given sums of squares over all
    parts. The sums are used in the order of the calls."""

    def __init__(self, squares: Any) -> None:
        super().__init__(jnp)
        self._squares = iter(squares)

    def norm(self, x: Any) -> Any:
        return jnp.sqrt(next(self._squares))
