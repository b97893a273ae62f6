"""The compiled parts of a custom loop in JAX: the loss with the weighted gradient, and the
update."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.errors import UserError
from hvdtrain.optim.clip import clip

WHERE = "ctx.value_and_grad()"


class Rules(NamedTuple):
    """The settings of a step."""

    update: Callable[..., Any]  # the transformation's update
    clip_norm: float | None
    clip_value: float | None
    skips: bool  # steps with numbers that are not finite


@dataclass(frozen=True)
class Gives:
    """The form of the result of the script's loss_of(): the loss, or a tuple with its count and
    another value."""

    count: bool
    aux: bool

    @property
    def named(self) -> str:
        """The name of the function, for messages."""
        return ", ".join(["the mean loss", *["its count"] * self.count, *["anything"] * self.aux])

    def split_result(self, found: Any) -> tuple[Any, Any, Any]:
        """Returns (loss, count or None, aux or None). Raises UserError for any other result."""
        length = 1 + self.count + self.aux
        if length > 1 and not (isinstance(found, tuple) and len(found) == length):
            having = " and ".join([*["has_count=True"] * self.count, *["has_aux=True"] * self.aux])
            what = f"loss_of returns a {type(found).__name__}"
            raise UserError(what, WHERE, f"with {having} a tuple of {length}: {self.named}")
        loss, *others = found if length > 1 else (found,)
        return loss, others[0] if self.count else None, others[-1] if self.aux else None


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def weighted_pass(
    loss_of: Callable[..., Any],
    gives: Gives,
    row_type: Any,
    params: Any,
    weight: Any,
    *arguments: Any,
) -> Any:
    """Returns (loss, count, aux), and `weight` times the count times the gradient: arrays in the
    order of params, or one row of dtype row_type.

    The gradient is NaN if the loss is not finite, which the reduction passes on to every rank. It
    is zero on a rank without samples or items. The count is 1 if loss_of returns none.
    """

    def loss_and_others(params: Any) -> tuple[Any, Any]:
        loss, count, aux = gives.split_result(loss_of(params, *arguments))
        _check_loss(loss)
        return loss, (loss, 1.0 if count is None else jnp.asarray(count, float), aux)

    gradient, found = jax.grad(loss_and_others, has_aux=True)(params)
    weight = weight * found[1]
    if weight.shape != ():
        what = f"the count is an array of shape {weight.shape}"
        raise UserError(what, WHERE, "one number: how many items the loss is the mean over")
    factor = jnp.where(jnp.isfinite(found[0]), weight, jnp.nan)
    arrays = [
        jnp.where(weight == 0, jnp.zeros_like(g), g * factor.astype(g.dtype))
        for g in jax.tree_util.tree_leaves(gradient)
    ]
    return found, arrays if row_type is None else jnp.concatenate(
        [g.ravel().astype(row_type) for g in arrays]
    )


def _check_loss(loss: Any) -> None:
    if (
        isinstance(loss, jax.Array)
        and loss.shape == ()
        and jnp.issubdtype(loss.dtype, jnp.floating)
    ):
        return
    found = (
        f"an array of {loss.dtype} {loss.shape}"
        if isinstance(loss, jax.Array)
        else f"a {type(loss).__name__}"
    )
    raise UserError(
        f"the loss is {found}",
        WHERE,
        "one number that depends on the parameters: the mean over this rank's samples",
    )


@functools.partial(jax.jit, static_argnums=0)
def split(kinds: Sequence[tuple[tuple[int, ...], Any]], row: jax.Array) -> list[jax.Array]:
    """Splits the row into arrays of these shapes and dtypes."""
    parts = jnp.split(row, np.cumsum([math.prod(shape) for shape, _ in kinds])[:-1])
    return [
        part.reshape(shape).astype(dtype) for part, (shape, dtype) in zip(parts, kinds, strict=True)
    ]


@functools.partial(jax.jit, static_argnums=0)
def updated(
    rules: Rules, gradient: Any, state: Any, params: Any, extra: Mapping[str, Any]
) -> tuple[Any, Any, Any]:
    """Returns new parameters and state, and whether a number of the gradient is not finite."""
    arrays, structure = jax.tree_util.tree_flatten(gradient)
    is_bad = ~jnp.stack([jnp.isfinite(g).all() for g in arrays]).all()
    clipped = jax.tree_util.tree_unflatten(
        structure, clip(arrays, rules.clip_norm, rules.clip_value, jnp)
    )
    updates, new_state = rules.update(clipped, state, params, **extra)
    # as in optax.apply_updates()
    new_params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
    before: Any = jax.tree_util.tree_structure(state)
    if jax.tree_util.tree_structure(new_state) != before:
        what = (
            "a step changes the tree structure of the transformation's state, which a checkpoint "
            "cannot store"
        )
        raise UserError(what, "ctx.update()", "a transformation whose state keeps its structure")
    if rules.skips:
        new_params, new_state = jax.tree.map(
            functools.partial(jnp.where, is_bad), (params, state), (new_params, new_state)
        )
    return new_params, new_state, is_bad
