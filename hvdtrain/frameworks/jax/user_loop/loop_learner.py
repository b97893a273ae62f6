"""JaxLoopLearner: adapts a script's JAX parameters and transformation to the Learner that
checkpoints, replicas and health use."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream, Batch, Piece, as_stream
from hvdtrain.core.progress import fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.build import pick_device
from hvdtrain.frameworks.jax.model import key_data
from hvdtrain.frameworks.jax.strategy import whole_piece
from hvdtrain.frameworks.jax.user_loop.compiled import (
    WHERE,
    Gives,
    Rules,
    split,
    updated,
    weighted_pass,
)
from hvdtrain.frameworks.jax.user_loop.prepared import (
    Tree,
    check_extra,
    check_given,
    tree_of_parameters,
    tree_of_state,
)
from hvdtrain.frameworks.jax.user_loop.samples import KeyedSamples
from hvdtrain.frameworks.jax.user_loop.words import WORDS
from hvdtrain.frameworks.learner import check_fit, gather, plain_names
from hvdtrain.frameworks.user_loop import Divisor, LoopLearner, item_count

_MOST_FUNCTIONS = 32  # limit for functions of a script: more means a new one in each step


class JaxLoopLearner(LoopLearner):
    """The learner of a custom loop, created on every rank with full parameters and state. on_step:
    called after each step of the transformation.

    The script gets new trees in each step; the trees that it passes must be the newest ones, array
    by array.
    """

    words = WORDS
    is_sharded = False
    lr = math.nan  # only the transformation knows the rate; a script may log it

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        params: Any,
        transformation: Any,
        on_step: Callable[[], None],
        example: Any,
    ) -> None:
        """Raises UserError if framework=jax cannot train them."""
        check_given(config, params, transformation, example)
        self.data = self.readers = mesh.data
        self.divisor = Divisor(config, mesh.data)
        self._on_step = on_step
        self._transformation = transformation
        # threads that read samples do not see the setting of a `with` block
        self._x64 = jax.config.read("jax_enable_x64")
        self._device = pick_device(jax, config, mesh.world)
        self.params, paths = tree_of_parameters(params, self._device)
        self.state_tree = tree_of_state(transformation, self.params, paths, self._device)
        self._row_type = np.result_type(*(p.dtype for p in self.params.arrays))
        self._kinds = tuple((p.shape, p.dtype) for p in self.params.arrays)
        self._rules = Rules(
            transformation.update,
            config.optim.clip_norm,
            config.optim.clip_value,
            config.guard.nonfinite == "skip",
        )
        self._functions: set[Callable[..., Any]] = set()  # compiled functions
        self._bad: Any = 0.0  # this rank's share of the steps with numbers that are not finite
        self._batch: KeyedSamples | None = None  # the batch whose step has not been made yet
        self._global_batch = 0
        self._gradient: Tree | None = None  # gradient of that batch

    def to_device(self, batch: Batch) -> KeyedSamples:
        with jax.enable_x64(self._x64):
            fields = {name: jax.device_put(array, self._device) for name, array in batch.items()}
        return KeyedSamples(fields, len(next(iter(batch.values()))))

    def begin_step(self, batch: KeyedSamples, global_batch: int, seed: int) -> KeyedSamples:
        assert self._batch is None, f"step {batch.step} begins before the one before it was made"
        self._batch = replace(
            batch, key_data=key_data(fold(fold(seed, batch.step), self.data.rank))
        )
        self._global_batch = global_batch
        self._gradient = None
        self.divisor.items = None
        return self._batch

    @property
    def prepared(self) -> tuple[Any, Any]:
        return self.params.whole(), self.state_tree.whole()

    def check_prepared(self, model: Any, optimizer: Any, where: str) -> None:
        self._check_params(model, where)
        if not self.state_tree.is_one(optimizer):
            fix = (
                f"{WORDS.step}: the state that the last call returned, and ctx.prepare() or "
                "ctx.resume() before"
            )
            raise UserError("the state is not the one that the last step returned", where, fix)

    def _check_params(self, params: Any, where: str) -> None:
        if not self.params.is_one(params):
            fix = (
                f"{WORDS.step}: the params that the last call returned, and ctx.prepare() or "
                "ctx.resume() before"
            )
            raise UserError(
                "the parameters are not the ones that the last step returned", where, fix
            )

    def check_resume(self, given: tuple[Any, ...]) -> None:
        if len(given) != 2:
            what = (
                "JAX arrays cannot be changed: the checkpoint's numbers are returned as new trees"
            )
            raise UserError(what, "ctx.resume()", WORDS.resume)
        self.check_prepared(*given, "ctx.resume()")

    def resumed(self, extra: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        return (*self.prepared, extra)

    def value_and_grad(
        self, loss_of: Callable[..., Any], *, has_aux: bool, has_count: bool, at_most: int | None
    ) -> Callable[..., Any]:
        if not callable(loss_of):
            raise UserError(
                f"{loss_of!r:.60} is not a function",
                WHERE,
                "def loss_of(params, batch): the mean loss over the batch",
            )
        if has_aux and at_most is not None:
            raise UserError(
                "has_aux=True with at_most=: each part would return its own value",
                WHERE,
                "one of the two",
            )
        if not has_count:
            self.divisor.need_count(
                WHERE, "ctx.value_and_grad(loss_of, has_count=True), and loss_of returns (loss, N)"
            )
        self._check_new(loss_of)
        gives = Gives(has_count, has_aux)
        one_pass = functools.partial(
            weighted_pass, loss_of, gives, self._row_type if self.data.size > 1 else None
        )

        def of_batch(params: Any, *arguments: Any) -> Any:
            batch = self._begin_passes(params, arguments)
            self.divisor.agree(WHERE, is_counted=has_count)
            if at_most is None:
                found, gradient = one_pass(params, self._weight(batch, gives), *arguments)
                loss = found[0]
                aux = found[2]
                items = self._items(batch, found[1]) if has_count else 0.0
            else:
                loss, items, gradient = self._in_parts(one_pass, gives, params, arguments, at_most)
                aux = None
            factor = self._global_batch / self.divisor.total(items) if has_count else 1.0
            self._gradient = self.params._replace(arrays=self._mean(gradient, factor))
            return (loss, aux) if has_aux else loss, self._gradient.whole()

        return of_batch

    def _weight(self, part: KeyedSamples, gives: Gives) -> float:
        """Returns the factor of the gradient of a part's mean, in addition to the count if loss_of
        returns one."""
        return (bool(part.count) if gives.count else part.count) / self._global_batch

    def _items(self, part: KeyedSamples, count: Any) -> float:
        """Returns the number of items of a part; the host waits for the device. Raises UserError if
        `count` is not a count."""
        return item_count(count, WHERE) if part.count else 0.0

    def _check_new(self, loss_of: Callable[..., Any]) -> None:
        """Raises UserError if each step uses a new function."""
        try:
            self._functions.add(loss_of)
        except TypeError as error:
            raise UserError(
                f"loss_of cannot be compiled: {error}",
                WHERE,
                "a plain function: def loss_of(params, batch)",
            ) from None
        if len(self._functions) > _MOST_FUNCTIONS:
            what = (
                f"more than {_MOST_FUNCTIONS} different functions: each one is compiled, so a new "
                "function in each step is slow"
            )
            raise UserError(
                what,
                WHERE,
                "one function, defined before the loop; pass what changes as an argument: "
                "(params, batch, rate)",
            )

    def _begin_passes(self, params: Any, arguments: Sequence[Any]) -> KeyedSamples:
        """Begins the pass of the current batch and returns it. Raises UserError if loss_of would
        get another batch."""
        if self._batch is None:
            fix = f"for batch in ctx.samples(dataset, batch=N): {WORDS.whole_step}"
            raise UserError("called outside of a loop over ctx.samples()", WHERE, fix)
        if self._gradient is not None:
            what = (
                "a second gradient for one batch: the first one was already reduced over all ranks"
            )
            raise UserError(
                what, WHERE, f"add the losses; to compute a batch in parts: {WORDS.parts}"
            )
        if any(
            isinstance(one, KeyedSamples)
            and (one.step, one.count) != (self._batch.step, self._batch.count)
            for one in arguments
        ):
            raise UserError(
                "loss_of gets a batch that is not the one of this step", WHERE, WORDS.gradient
            )
        self._check_params(params, WHERE)
        return self._batch

    def _in_parts(
        self,
        one_pass: Callable[..., Any],
        gives: Gives,
        params: Any,
        arguments: Sequence[Any],
        at_most: int,
    ) -> tuple[Any, float, Any]:
        """Returns the mean loss over this rank's samples or items, their number, and the sum of the
        parts' weighted gradients."""
        batch = self._batch
        assert batch is not None
        if not any(argument is batch for argument in arguments):
            raise UserError(
                "at_most= divides the batch, but loss_of does not get the batch", WHERE, WORDS.parts
            )
        number = math.ceil(math.ceil(self._global_batch / self.data.size) / at_most)
        loss: Any = 0.0
        items = 0.0
        total: Any = None
        for part in batch.micro_batches(number):
            of_part = [part if argument is batch else argument for argument in arguments]
            (part_loss, count, _), gradient = one_pass(params, self._weight(part, gives), *of_part)
            weight = self._items(part, count) if gives.count else float(part.count)
            loss = loss + part_loss * weight if weight else loss  # the mean over nothing may be NaN
            items += weight
            total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
        return loss / (items or 1.0), items, total

    def _mean(self, gradient: Any, factor: float) -> list[jax.Array]:
        """Returns the sum over ranks of the weighted gradients, times the factor. A collective."""
        if self.data.size > 1:
            # the host waits for the device here
            host = self.data.allreduce(np.asarray(gradient), "gradient.0")
            gradient = split(self._kinds, jax.device_put(host, self._device))
        arrays: list[jax.Array] = gradient
        return arrays if factor == 1.0 else [g * jnp.asarray(factor, g.dtype) for g in arrays]

    def update(
        self, gradient: Any, state: Any, params: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        if self._batch is None:
            what = "ctx.update() without a new batch"
            raise UserError(what, "ctx.update()", "one step for each batch of ctx.samples()")
        if self._gradient is None or not self._gradient.is_one(gradient):
            what = (
                "the gradient is not the one that ctx.value_and_grad() or ctx.grad() gave for "
                "this batch, the mean over all ranks"
            )
            fix = (
                f"{WORDS.whole_step}; to change gradients, use the transformation: optax.chain(...)"
            )
            raise UserError(what, "ctx.update()", fix)
        self.check_prepared(params, state, "ctx.update()")
        check_extra(self._transformation, extra)
        new_params, new_state, is_bad = updated(self._rules, gradient, state, params, dict(extra))
        self._bad = self._bad + is_bad / self.data.size
        self.params = _next(self.params, new_params)
        self.state_tree = _next(self.state_tree, new_state)
        self._batch = self._gradient = None
        self._on_step()
        return new_params, new_state

    @property
    def has_stepped(self) -> bool:
        return self._batch is None

    def read_nonfinite(self) -> float:
        """Returns this rank's share of the steps with nonfinite numbers since the last call."""
        count = float(self._bad)
        self._bad = 0.0
        return count

    def sync_buffers(self, communicator: Communicator) -> None:
        """Does nothing: there are no buffers."""

    def state(self, *, is_kept: bool = True) -> Arrays:
        return gather(self.data, self.pieces(), is_kept=is_kept)

    def pieces(self) -> Iterator[Piece]:
        for tree in (self.params, self.state_tree):
            yield from map(whole_piece, tree.names, tree.arrays)

    def state_dict_names(self) -> dict[str, str]:
        return plain_names(self.params.names)

    def load(self, state: Arrays | ArrayStream) -> None:
        live = {piece.name: piece for piece in self.pieces()}
        stream = as_stream(state)
        check_fit(
            {name: piece.shape for name, piece in live.items()}, stream.shapes, stream.is_partial
        )
        loaded = {
            name: jax.device_put(np.array(array, live[name].dtype), self._device)
            for name, array in stream.arrays
        }
        self.params, self.state_tree = (
            self.params.with_arrays(loaded),
            self.state_tree.with_arrays(loaded),
        )
        self._batch = self._gradient = None

    def describe(self) -> str:
        count = sum(p.size for p in self.params.arrays)
        dtypes = sorted({p.dtype.name for p in self.params.arrays})
        how = "gradients by one allreduce" if self.data.size > 1 else "no reduction"
        return (
            f"{count:,} parameters, jax {', '.join(dtypes)} on "
            f"{self._device.platform}:{self._device.id}, {how}"
        )


def _next(tree: Tree, new: Any) -> Tree:
    return tree._replace(arrays=jax.tree_util.tree_leaves(new))
