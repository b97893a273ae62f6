"""A script's parameters, and the state of its transformation: trees of arrays on this rank's
device, with their names in a checkpoint."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import DEFAULT
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.user_loop.words import WORDS
from hvdtrain.frameworks.jax.user_optimizer import Path, name_of_other, owner_of

WHERE = "ctx.prepare()"


class Tree(NamedTuple):
    """A tree of arrays."""

    names: list[str]  # name of each array in a checkpoint
    structure: Any
    arrays: list[jax.Array]

    def whole(self) -> Any:
        """Returns the tree in the script's structure."""
        return jax.tree_util.tree_unflatten(self.structure, self.arrays)

    def is_one(self, tree: Any) -> bool:
        """Whether a tree consists of the same arrays, as objects and not only by value."""
        arrays, structure = jax.tree_util.tree_flatten(tree)
        return structure == self.structure and all(
            a is b for a, b in zip(arrays, self.arrays, strict=True)
        )

    def with_arrays(self, named: Mapping[str, jax.Array]) -> Tree:
        """Others of these names, as far as there are any."""
        return self._replace(
            arrays=[named.get(name, old) for name, old in zip(self.names, self.arrays, strict=True)]
        )


def check_given(config: Config, params: Any, transformation: Any, example: Any) -> None:
    """Raises UserError for a wrong transformation, and for keys that have no effect here."""
    is_optax = callable(getattr(transformation, "init", None)) and callable(
        getattr(transformation, "update", None)
    )
    kinds = f"a {type(params).__name__} and a {type(transformation).__name__}"
    if any(base.__module__.startswith("torch.") for base in type(params).__mro__):
        raise UserError(
            f"{kinds}, but framework=jax",
            WHERE,
            "framework=torch, or leave framework= out; or parameters as arrays of JAX",
        )
    if not is_optax:
        raise UserError(
            f"{kinds}, not a tree of arrays and a transformation with init() and update()",
            WHERE,
            WORDS.prepare,
        )
    if config.shard.stage:
        what = (
            "with framework=jax, a custom loop keeps all parameters and the whole state on every "
            "rank"
        )
        raise UserError(
            what,
            config.where("shard.stage"),
            "shard.stage=0; or hvdtrain.train(), which has shards in JAX",
        )
    if config.origin("speed.precision") != DEFAULT:
        what = (
            "with framework=jax, parameters and samples keep the types that the script gives them"
        )
        fix = "leave speed.precision out; jax.config.update('jax_enable_x64', True) for float64"
        raise UserError(what, config.where("speed.precision"), fix)
    if example is not None:
        raise UserError(
            "example= is for sharded models, which framework=jax does not have",
            WHERE,
            WORDS.prepare,
        )


def tree_of_parameters(params: Any, device: Any) -> tuple[Tree, list[Path]]:
    """Returns the parameters and the path of each. Raises UserError for arrays that cannot be
    trained, and for names that are equal in a checkpoint."""
    found, structure = jax.tree_util.tree_flatten_with_path(params)
    paths = [path for path, _ in found]
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]
    if not names or not all(names):
        raise UserError(
            f"the parameters are {'one array' if names else 'a tree without arrays'}",
            WHERE,
            'a tree: {"w": w}',
        )
    if doubled := [name for name, times in Counter(names).items() if times > 1]:
        raise UserError(f"two parameters are named {doubled[0]}", WHERE, "keys without a dot")
    for name, (_, array) in zip(names, found, strict=True):
        _check_parameter(name, array)
    return Tree(
        [f"p.{name}" for name in names],
        structure,
        [jax.device_put(array, device) for _, array in found],
    ), paths


def _check_parameter(name: str, array: Any) -> None:
    if not isinstance(array, (np.ndarray, jax.Array)) or array.dtype not in (
        np.float32,
        np.float64,
    ):
        kind = (
            f"an array of {array.dtype}" if hasattr(array, "dtype") else f"a {type(array).__name__}"
        )
        fix = (
            "only arrays of float32 or float64; pass what is not trained to loss_of separately, "
            "and convert to bfloat16 inside it"
        )
        raise UserError(f"the parameter {name} is {kind}", WHERE, fix)
    if isinstance(array, jax.Array) and len(array.devices()) > 1:
        what = (
            f"the parameter {name} is on {len(array.devices())} devices, but a rank computes on one"
        )
        raise UserError(what, WHERE, "a rank for each device: hvdtrain launch -np N, or mpirun")


def tree_of_state(transformation: Any, params: Tree, paths: Sequence[Path], device: Any) -> Tree:
    """Returns the state before the first step. Raises UserError unless it consists of arrays that a
    checkpoint can store."""
    found, structure = jax.tree_util.tree_flatten_with_path(transformation.init(params.whole()))
    names = _state_names([path for path, _ in found], params.names, paths)
    for name, (_, array) in zip(names, found, strict=True):
        dtype = getattr(array, "dtype", None)
        if (
            dtype is None
            or jnp.issubdtype(dtype, jax.dtypes.extended)
            or np.dtype(dtype).kind not in "iufb"
        ):
            kind = f"an array of {dtype}" if dtype is not None else f"a {type(array).__name__}"
            what = (
                f"the state of the transformation has {kind} at "
                f"{name.removeprefix('s.').strip()}, which a checkpoint cannot store"
            )
            raise UserError(
                what,
                WHERE,
                "arrays of numbers; for a random key: jax.random.PRNGKey(), which is such an array",
            )
    return Tree(names, structure, [jax.device_put(array, device) for _, array in found])


def _state_names(
    paths: Sequence[Path], parameters: Sequence[str], paths_of_parameters: Sequence[Path]
) -> list[str]:
    """Returns s.PARAMETER.0, ... for arrays that belong to a parameter, and the path for other
    arrays."""
    counts = Counter[int]()
    names = []
    for path in paths:
        owner = owner_of(path, paths_of_parameters)
        names.append(
            name_of_other(path)
            if owner is None
            else f"s.{parameters[owner].removeprefix('p.')}.{counts[owner]}"
        )
        if owner is not None:
            counts[owner] += 1
    return names


def check_extra(transformation: Any, extra: Mapping[str, Any]) -> None:
    """Raises UserError for further arguments that update() of the transformation does not take."""
    if wrong := next((name for name, value in extra.items() if callable(value)), None):
        what = (
            f"{wrong} is a function: a transformation that computes losses itself would only see "
            "this rank's samples"
        )
        raise UserError(what, "ctx.update()", "one whose update takes gradients, such as adamw")
    try:
        inspect.signature(transformation.update).bind(None, None, None, **extra)
    except TypeError as error:
        fix = (
            "the same value on all ranks: ctx.update(gradient, state, params, "
            "value=ctx.mean({'loss': loss})['loss'])"
        )
        raise UserError(f"update() of the transformation: {error}", "ctx.update()", fix) from None
