"""Modules of flax (linen and nnx), equinox and haiku as functions of their parameters, and with
trained ones."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.own_line import own_line
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.layers import Functions, Params

# values in training
_FLAGS = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "inference": False,
}


class ChangedByPass(Exception):
    """Raised if a model has state that a forward pass changes."""


class ModuleLibrary(Protocol):
    """How to use the modules of one library."""

    takes: str  # name of the argument that a module is called with

    def functions(self, module: Any, x: jax.ShapeDtypeStruct, key: jax.Array) -> Functions:
        """Returns the functions for inputs like x (rows, ...). The functions, and this call, may
        raise ChangedByPass."""

    def form(self, module: Any) -> str:
        """Returns a description of the module without its weights, for comparison among ranks."""

    def trained(self, module: Any, params: Params) -> Any:
        """Returns the trained model for the script: a module with these weights, or the parameters
        themselves."""


class Linen:
    """flax.linen.Module: a description of layers; a bound one has weights too, and training begins
    with them."""

    takes = "a module takes (n, ...): images (n, H, W, C)"

    def functions(self, module: Any, x: jax.ShapeDtypeStruct, key: jax.Array) -> Functions:
        bound: Mapping[str, Any] = {}
        if module.scope is not None:
            module, bound = module.unbind()
        flags = _flags_of(type(module).__call__)
        constants = {
            name: values
            for name, values in bound.items()
            if name not in ("params", "intermediates")
        }

        def first(key: jax.Array) -> Any:
            return module.init({"params": key}, _zeros(x), **flags(True))

        def init(key: jax.Array) -> Params:
            params: Params = (bound or jax.jit(first)(key)).get("params", {})
            return params

        def apply(params: Params, x: jax.Array, key: jax.Array | None = None) -> Any:
            # a stream without a separate key draws from this one
            rngs = {} if key is None else {"params": key}
            try:
                return module.apply(
                    {"params": params, **constants}, x, rngs=rngs, **flags(key is not None)
                )
            except Exception as error:
                if type(error).__name__ == "ModifyScopeVariableError":
                    raise ChangedByPass(f"{error}".partition(" (http")[0]) from error
                raise

        def sown(params: Params, x: jax.Array) -> Any:
            _, collections = module.apply(
                {"params": params, **constants}, x, mutable=["intermediates"], **flags(False)
            )
            return collections.get("intermediates", {})

        if (
            kept := []
            if bound
            else sorted(set(jax.eval_shape(first, key)) - {"params", "intermediates"})
        ):
            raise ChangedByPass(f"it has the collection {', '.join(kept)}")
        return Functions(
            init, apply, _sown(_by_path(jax.eval_shape(sown, jax.eval_shape(init, key), x)))
        )

    def form(self, module: Any) -> str:
        return repr(module)

    def trained(self, module: Any, params: Params) -> Any:
        return params


class Haiku:
    """The result of haiku.transform, or of transform_with_state for a function without state."""

    takes = "a module takes (n, ...): images (n, H, W, C)"

    def functions(self, module: Any, x: jax.ShapeDtypeStruct, key: jax.Array) -> Functions:
        flags = _flags_of(module.apply)
        has_state = "state" in inspect.signature(module.apply).parameters

        def first(key: jax.Array) -> tuple[Params, Any]:
            found = module.init(key, _zeros(x), **flags(True))
            return found if has_state else (found, {})

        def apply(params: Params, x: jax.Array, key: jax.Array | None = None) -> Any:
            if has_state:
                return module.apply(params, {}, key, x, **flags(key is not None))[0]
            return module.apply(params, key, x, **flags(key is not None))

        try:
            params, state = jax.eval_shape(first, key)
        except Exception as error:
            if type(error).__name__ == "NonEmptyStateError":
                raise ChangedByPass("it needs transform_with_state") from error
            raise
        if state:
            raise ChangedByPass(f"it has the state {', '.join(sorted(state))}")
        short = {name: re.sub(r"(/~)?/", ".", name) for name in params}
        if len(set(short.values())) < len(short):
            short = {name: name.replace("/", ".") for name in params}

        def name_of(path: str) -> str:
            module_name, _, parameter = path.rpartition(".")
            return f"{short[module_name]}.{parameter}"

        return Functions(lambda key: jax.jit(first)(key)[0], apply, name_of=name_of)

    def form(self, module: Any) -> str:
        return repr(inspect.signature(module.apply))

    def trained(self, module: Any, params: Params) -> Any:
        return params


class Nnx:
    """flax.nnx.Module, which contains its weights and changes when it is called: each pass uses a
    copy."""

    takes = "a module takes (n, ...): images (n, H, W, C)"

    def functions(self, module: Any, x: jax.ShapeDtypeStruct, key: jax.Array) -> Functions:
        from flax import nnx

        graph, *states = nnx.split(module, nnx.Param, nnx.RngKey, nnx.RngCount, ...)
        flat = [jax.tree.flatten(state) for state in states]
        _, (keys, _), (counts, _), (others, _) = flat
        flags = _flags_of(type(module).__call__)
        wanted = inspect.signature(type(module).__call__).parameters
        start = nnx.to_pure_dict(states[0])
        sown: set[str] = set()

        def apply(params: Params, x: jax.Array, key: jax.Array | None = None) -> Any:
            own = (
                keys
                if key is None
                else [_keys_like(old, jax.random.fold_in(key, i)) for i, old in enumerate(keys)]
            )
            zeros = counts if key is None else [jnp.zeros_like(count) for count in counts]
            numbers = [
                jax.tree.leaves(params),
                own,
                zeros,
                [_as(jnp.result_type(float), jnp.asarray(array)) for array in others],
            ]
            parts = [
                jax.tree.unflatten(form, leaves)
                for (_, form), leaves in zip(flat, numbers, strict=True)
            ]
            before = _by_path(parts[3])
            copy = nnx.merge(graph, *parts)
            (copy.eval if key is None else copy.train)()
            more = {"rngs": nnx.Rngs(key)} if key is not None and "rngs" in wanted else {}
            outputs = copy(x, **flags(key is not None), **more)
            after = _by_path(nnx.split(copy, nnx.Param, nnx.RngKey, nnx.RngCount, ...)[-1])
            if changed := sorted(
                path for path, array in before.items() if after.get(path) is not array
            ):
                raise ChangedByPass(f"it changes {', '.join(changed)}")
            sown.update(after.keys() - before.keys())
            return outputs

        assert len(flat[0][0]) == len(jax.tree.leaves(start)), flat[0][1]
        jax.eval_shape(apply, start, x)
        return Functions(lambda key: start, apply, _sown(sown))

    def form(self, module: Any) -> str:
        from flax import nnx

        return repr(nnx.graphdef(module))

    def trained(self, module: Any, params: Params) -> Any:
        """Returns the module itself, in evaluation mode."""
        from flax import nnx

        state = nnx.state(module, nnx.Param)
        leaves, form = jax.tree.flatten(state)
        nnx.update(module, jax.tree.unflatten(form, _like(leaves, params)))
        module.eval()
        return module


class Equinox:
    """equinox.Module: a tree that contains its weights and is called for one sample."""

    takes = "a module takes one sample: an image (H, W, C)"

    def functions(self, module: Any, x: jax.ShapeDtypeStruct, key: jax.Array) -> Functions:
        import equinox

        if any(
            isinstance(part, equinox.nn.StateIndex)
            for part in _parts(module, equinox.nn.StateIndex)
        ):
            raise ChangedByPass("it has a layer with a StateIndex")
        params, static = equinox.partition(module, equinox.is_inexact_array)
        wanted = inspect.signature(type(module).__call__).parameters
        flags = _flags_of(type(module).__call__)

        def apply(params: Any, x: jax.Array, key: jax.Array | None = None) -> Any:
            whole = equinox.combine(params, static)
            called = whole if key is not None else equinox.nn.inference_mode(whole)
            if key is None or "key" not in wanted:
                more = {"key": None} if "key" in wanted else {}
                return jax.vmap(lambda x: called(x, **flags(key is not None), **more))(x)
            keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(len(x)))
            return jax.vmap(lambda x, key: called(x, key=key, **flags(True)))(x, keys)

        return Functions(lambda key: params, apply)

    def form(self, module: Any) -> str:
        return repr(module)

    def trained(self, module: Any, params: Params) -> Any:
        """Returns a module like this one, with the same dtypes."""
        import equinox

        old, static = equinox.partition(module, equinox.is_inexact_array)
        leaves, form = jax.tree.flatten(old)
        return equinox.combine(jax.tree.unflatten(form, _like(leaves, params)), static)


_LIBRARIES: dict[str, ModuleLibrary] = {  # by the class of a model
    "flax.linen.module.Module": Linen(),
    "flax.nnx.module.Module": Nnx(),
    "equinox._module._module.Module": Equinox(),
    "haiku._src.transform.Transformed": Haiku(),
    "haiku._src.transform.TransformedWithState": Haiku(),
}


def library_of(model: Any) -> ModuleLibrary | None:
    """Finds the library of a model by the names of its classes, without importing one. A pair
    (module, state) counts as an equinox module."""
    module = (
        model[0]
        if isinstance(model, tuple) and len(model) == 2 and not callable(model[1])
        else model
    )
    return next(
        (
            found
            for kind in type(module).__mro__
            if (found := _LIBRARIES.get(f"{kind.__module__}.{kind.__name__}"))
        ),
        None,
    )


def functions_of(
    library: ModuleLibrary,
    module: Any,
    x: jax.ShapeDtypeStruct,
    dtype: np.dtype,
    key: jax.Array,
    config: Config,
) -> Functions:
    """Converts a module to functions whose outputs have the job's dtype. Nothing is computed.

    Raises UserError if it fails for inputs like x, or returns a smaller dtype than the job's
    float64. Also rejects state that a forward pass changes, because running statistics would
    include padding and differ between ranks.
    """
    where = config.where("model.name")
    try:
        functions = library.functions(module, x, key)
        params = jax.eval_shape(
            lambda: jax.tree.map(lambda array: _as(dtype, array), functions.init(key))
        )
        of_passes = [jax.eval_shape(functions.apply, params, x, *more) for more in ((), (key,))]
    except ChangedByPass as error:
        what = (
            f"{config.model.name} keeps state that a forward pass changes, which would depend on "
            f"the number of ranks and on padding: {error}"
        )
        fix = (
            "LayerNorm or GroupNorm instead of BatchNorm; hvdtrain's own models have batch "
            "norms, model.name=resnet18"
        )
        raise UserError(what, where, fix) from error
    except Exception as error:
        message = next(iter(f"{error}".splitlines()), "")
        what = (
            f"the model fails for inputs {x.shape} of {x.dtype}: {type(error).__name__}: {message}"
        )
        raise UserError(what, f"{where}; {own_line(error)}", library.takes) from error
    small = {
        f"{y.dtype}" for y in jax.tree.leaves(of_passes) if jnp.issubdtype(y.dtype, jnp.floating)
    } - {"float64"}
    if dtype == np.float64 and small:
        what = f"the model returns {', '.join(sorted(small))}, but the job computes in float64"
        raise UserError(
            what,
            config.where("speed.precision"),
            "layers without an explicit dtype; or speed.precision=fp32",
        )

    def apply(params: Params, x: jax.Array, key: jax.Array | None = None) -> Any:
        return jax.tree.map(lambda y: _as(dtype, y), functions.apply(params, x, key))

    return functions._replace(apply=apply)


def random_arguments(config: Config, key: jax.Array) -> dict[str, Any]:
    """Returns the random argument for initial weights: `key`, or `rngs` of flax.nnx, if the user's
    function or class has that parameter."""
    if not plugins.is_dotted(config.model.name):
        return {}
    wanted = plugins.signature_of(plugins.own_function(config.model)).parameters
    nnx = sys.modules.get("flax.nnx")
    return ({"key": key} if "key" in wanted else {}) | (
        {"rngs": nnx.Rngs(key)} if nnx and "rngs" in wanted else {}
    )


def _flags_of(call: Any) -> Callable[[bool], dict[str, bool]]:
    """Returns is_training -> the arguments of `call` that select the mode."""
    wanted = {
        name: value for name, value in _FLAGS.items() if name in inspect.signature(call).parameters
    }
    return lambda training: {name: value == training for name, value in wanted.items()}


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype)


def _as(dtype: np.dtype, array: Any) -> Any:
    """Casts real numbers to this dtype."""
    return (
        array.astype(dtype)
        if hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.floating)
        else array
    )


def _by_path(state: Any) -> dict[str, Any]:
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): array
        for path, array in paths
    }


def _sown(paths: Iterable[str]) -> tuple[str, ...]:
    """Returns a header line for values that a module sows, such as a penalty that its training loop
    would add to the loss."""
    names = sorted({re.sub(r"(\.value)?(\.\d+)+$", "", path) for path in paths})
    return (f"not used: what the model sows: {', '.join(names)}",) if names else ()


def _keys_like(old: jax.Array, key: jax.Array) -> jax.Array:
    """Returns a key, or an array of keys, of the shape of the old one."""
    return jax.random.split(key, old.shape) if old.shape else key


def _parts(tree: Any, kind: type) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, kind))


def _like(old: list[jax.Array], params: Params) -> list[jax.Array]:
    """Casts parameters to the dtypes of the old ones."""
    return [
        jnp.asarray(np.asarray(new), array.dtype)
        for array, new in zip(old, jax.tree.leaves(params), strict=True)
    ]
