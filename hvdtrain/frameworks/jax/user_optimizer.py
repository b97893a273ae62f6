"""optim.name=optax:adamw in JAX: an optax-style gradient transformation for all parameters of a
model."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hvdtrain.config.plugins import fix_of_parameters, own_function
from hvdtrain.config.schema import Config
from hvdtrain.config.sections.section import is_object
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.step import OptimizerState, Weights
from hvdtrain.optim.rule import ArrayOps, Ops, is_excluded

MOMENTUM = ("momentum", "b1")  # parameters of a function that optim.momentum is
_OPS = ArrayOps(jnp)
_SMALL = 3  # elements along each dimension of the arrays that a transformation is tried with


class UserFunction:
    """A function that creates a transformation, a pair init(params), update(gradients, state,
    params), and its arguments.

    learning_rate follows the recipe, if it has this parameter. weight_decay, and momentum or b1,
    are from `optim` if set there; otherwise its defaults apply.
    """

    def __init__(self, config: Config) -> None:
        """Raises UserError if the function lacks a parameter that the configuration sets, or if its
        options do not match."""
        optim = config.optim
        self.name = config.optim.name
        self._where = config.where("optim.name")
        self._function = own_function(optim)
        signature = inspect.signature(self._function)
        has = signature.parameters
        if "learning_rate" in optim.options:
            what = "optim.learning_rate is not an option: the recipe sets the rate of each step"
            raise UserError(what, config.where("optim.learning_rate"), "optim.base_lr=...")
        self.has_rate = "learning_rate" in has
        self._arguments = dict(optim.options)
        momentum = next((key for key in MOMENTUM if key in has), None)
        if optim.momentum is not None:
            self._set(momentum, "momentum", optim.momentum, signature, config)
        if optim.weight_decay is not None and (optim.decay > 0 or "weight_decay" in has):
            self._set(
                "weight_decay" if "weight_decay" in has else None,
                "weight_decay",
                optim.decay,
                signature,
                config,
            )
        self.decays_some = (
            optim.weight_decay is not None
            and optim.decay > 0
            and optim.exclude == "norms_and_biases"
        )
        try:
            signature.bind(**self._all_arguments(optim.base_lr, decays=True))
        except TypeError as error:
            fix = fix_of_parameters(optim, signature)
            raise UserError(
                f"{self.name}{signature} does not fit: {error}", self._where, fix
            ) from None
        self._check_made(optim.base_lr)

    @property
    def path(self) -> str:
        """The canonical name, such as optax.adamw, however the user wrote it."""
        if is_object(self.name):
            return self.name
        module = self._function.__module__
        name = getattr(self._function, "__qualname__", type(self._function).__qualname__)
        return self.name.replace(":", ".") if module.startswith("optax.") else f"{module}.{name}"

    def transformation(self, rate: Any, *, decays: bool = True) -> Any:
        """Returns the transformation for a learning rate (a number or traced); without weight decay
        unless `decays`."""
        return self._function(**self._all_arguments(rate, decays))

    def _set(
        self,
        key: str | None,
        wanted: str,
        value: float,
        signature: inspect.Signature,
        config: Config,
    ) -> None:
        if key is None:
            what = (
                f"{self.name} has no {wanted}; it has "
                f"{', '.join(signature.parameters) or 'no parameters'}"
            )
            raise UserError(
                what,
                config.where(f"optim.{wanted}"),
                f"leave optim.{wanted} out, or give another function",
            )
        self._arguments[key] = value

    def _all_arguments(self, rate: Any, decays: bool) -> dict[str, Any]:
        given = self._arguments | ({"learning_rate": rate} if self.has_rate else {})
        return given if decays else given | {"weight_decay": 0.0}

    def _check_made(self, rate: float) -> None:
        """Raises UserError if the function fails, or does not return a transformation."""
        try:
            made = self.transformation(rate)
        except Exception as error:  # an error in user code, or an invalid number
            message = (
                f"{error}"
                if isinstance(error, (TypeError, ValueError))
                else f"{type(error).__name__}: {error}"
            )
            raise UserError(
                f"{self.name} fails: {message}",
                self._where,
                "give its parameters as optim.<name>=<value>",
            ) from error
        if not (callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))):
            what = f"{self.name} returned a {type(made).__name__}, not a GradientTransformation"
            raise UserError(
                what, self._where, "a function that returns one, as optim.name=optax:adamw"
            )


class UserOptimizer:
    """An optimizer from a UserFunction, with the methods of Optimizer. Its state has one entry for
    each parameter, then one tuple of everything else.

    An array of the state belongs to a parameter if its path in the state ends with the parameter's
    path.
    """

    def __init__(
        self,
        config: Config,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        structure: Any,
    ) -> None:
        """structure: of the user's parameter tree. Raises UserError if a step fails."""
        self.function = UserFunction(config)
        self.shapes = list(shapes)
        self._names = list(names)
        self._where = config.where("optim.name")
        self._params = structure
        self._excluded = (
            [is_excluded(shape) for shape in shapes] if self.function.decays_some else []
        )
        self._rate = config.optim.base_lr
        paths, _ = jax.tree_util.tree_flatten_with_path(self._tree([np.zeros(())] * len(names)))
        self._paths = [path for path, _ in paths]
        # for each array of the state: the number of its parameter, or None
        self._owners: list[int | None] = []
        self._others: list[str] = []  # names of the arrays that belong to no parameter
        self._structure: Any = None  # structure of the state
        self._try(config)

    @property
    def made_by(self) -> str:
        return self.function.path

    def start(self, weights: Sequence[Any]) -> OptimizerState:
        return self._split(self._state_of(self._tree([jnp.asarray(p) for p in weights])))

    def apply(
        self,
        gradients: Sequence[Any],
        optimizer_state: OptimizerState,
        weights: Weights,
        hyper: Hyper,
        ops: Ops,
    ) -> tuple[Weights, OptimizerState]:
        updates, new = self._update(gradients, optimizer_state, weights, hyper.lr, decays=True)
        if any(self._excluded):
            plain, plain_state = self._update(
                gradients, optimizer_state, weights, hyper.lr, decays=False
            )
            updates = [
                u if is_out else old
                for u, old, is_out in zip(plain, updates, self._excluded, strict=True)
            ]
            new = [
                plain_state[i] if i < len(plain) and self._excluded[i] else state
                for i, state in enumerate(new)
            ]
        rate = 1.0 if self.function.has_rate else hyper.lr
        new_weights = [
            (p + rate * u).astype(p.dtype) for p, u in zip(weights, updates, strict=True)
        ]
        pairs = (
            zip(state, old, strict=True) for state, old in zip(new, optimizer_state, strict=True)
        )
        return new_weights, [
            tuple(jnp.asarray(array).astype(old.dtype) for array, old in each) for each in pairs
        ]

    def state_names(self, optimizer_state: OptimizerState) -> list[list[str]]:
        """Returns s.PARAMETER.0, ..., and for other arrays the path in the state after a space,
        with which no parameter name begins."""
        of_each = zip(self._names, optimizer_state[:-1], strict=True)
        return [[f"s.{name}.{i}" for i in range(len(state))] for name, state in of_each] + [
            self._others
        ]

    def check_elementwise(self) -> None:
        """Raises UserError if steps on two parts of the parameters differ from steps on all of
        them; shard.stage needs them to be equal.

        Compares four steps on small arrays in the user's tree, the last one with a NaN, and checks
        the shapes of the state.
        """
        state = jax.eval_shape(
            self.start, [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]
        )
        wrong = [
            f"has state of shape {array.shape} for {name} of shape {shape}"
            for name, shape, arrays in zip(self._names, self.shapes, state[:-1], strict=True)
            for array in arrays
            if array.shape not in ((), shape)
        ]
        with jax.enable_x64(True):
            whole = self._small()
            parts = [
                [p.ravel()[half] for p in self._small()] for half in (slice(0, 2), slice(2, None))
            ]
            try:
                found = [
                    jnp.concatenate(both) for both in zip(*map(self._steps, parts), strict=True)
                ]
                expected = [p.ravel() for p in self._steps(whole)]
            except Exception as error:
                wrong.append(f"fails: {type(error).__name__}: {error}")
            else:
                if not all(
                    np.allclose(a, b, rtol=1e-9, atol=1e-12, equal_nan=True)
                    for a, b in zip(found, expected, strict=True)
                ):
                    wrong.append("gives other numbers than one on the whole")
        if wrong:
            what = (
                "shard.stage makes steps on parts of a parameter; such a step of "
                f"{self.function.name} {wrong[0]}"
            )
            fix = (
                "an optimizer of hvdtrain, an elementwise one such as optax:adamw, or shard.stage=0"
            )
            raise UserError(what, self._where, fix)

    def _tree(self, arrays: Sequence[Any]) -> Any:
        return jax.tree_util.tree_unflatten(self._params, arrays)

    def _state_of(self, params: Any) -> Any:
        """Returns the transformation's initial state, and records which parameters its arrays
        belong to."""
        state = self.function.transformation(self._rate).init(params)
        paths, self._structure = jax.tree_util.tree_flatten_with_path(state)
        self._owners = [owner_of(path, self._paths) for path, _ in paths]
        self._others = [
            name_of_other(path)
            for (path, _), owner in zip(paths, self._owners, strict=True)
            if owner is None
        ]
        return state

    def _split(self, state: Any) -> OptimizerState:
        found: list[list[Any]] = [[] for _ in range(len(self._names) + 1)]
        for owner, array in zip(self._owners, jax.tree_util.tree_leaves(state), strict=True):
            found[-1 if owner is None else owner].append(array)
        return [tuple(arrays) for arrays in found]

    def _joined(self, optimizer_state: OptimizerState) -> Any:
        rest = [iter(arrays) for arrays in optimizer_state]
        return jax.tree_util.tree_unflatten(
            self._structure, [next(rest[-1 if owner is None else owner]) for owner in self._owners]
        )

    def _update(
        self,
        gradients: Sequence[Any],
        optimizer_state: OptimizerState,
        weights: Sequence[Any],
        rate: Any,
        *,
        decays: bool,
    ) -> tuple[list[Any], OptimizerState]:
        """Returns the change of each parameter, and the new state."""
        made = self.function.transformation(rate, decays=decays)
        old = self._joined(optimizer_state)
        updates, new = made.update(self._tree(list(gradients)), old, self._tree(list(weights)))
        if (found := jax.tree_util.tree_structure(new)) != self._structure:
            raise ValueError(
                f"a step changes the structure of its state: {found}, {self._structure}"
            )
        return jax.tree_util.tree_leaves(updates), self._split(new)

    def _small(self) -> list[Any]:
        """Returns small parameters with the same numbers of dimensions as the model's."""
        shapes = [tuple(min(size, _SMALL) for size in shape) for shape in self.shapes]
        return [
            jnp.cos(jnp.arange(math.prod(shape)) + i).reshape(shape)
            for i, shape in enumerate(shapes)
        ]

    def _steps(self, weights: Sequence[Any]) -> list[Any]:
        """Returns the weights after four steps with gradients computed from the weights. The last
        gradient has a NaN if an array has a number above 0.999."""
        state = self.start(weights)
        start = list(weights)
        now = list(weights)
        for step in range(4):
            gradients = [jnp.sin((step + 2) * 3 * p) for p in start]
            if step == 3:
                gradients = [
                    jnp.where(p > 0.999, jnp.nan, g) for p, g in zip(start, gradients, strict=True)
                ]
            now, state = self.apply(
                gradients, state, now, Hyper(self._rate, 0.0, 0.0, batch=1, step=step), _OPS
            )
        return now

    def _try(self, config: Config) -> None:
        """Raises UserError if a step fails, needs unsupported arguments, or ascends the
        gradient."""
        weights = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in self.shapes]
        hyper = Hyper(self._rate, 0.0, 0.0, batch=1)
        name = self.function.name
        try:
            state = jax.eval_shape(self.start, weights)
            if any(self._excluded):
                plain = jax.eval_shape(
                    self.function.transformation(self._rate, decays=False).init, self._tree(weights)
                )
                if jax.tree_util.tree_structure(plain) != self._structure:
                    what = (
                        f"with weight_decay=0, as used for norms and biases, {name} keeps a "
                        "different state"
                    )
                    raise UserError(
                        what,
                        self._where,
                        "optim.exclude=none, or a function whose state does not depend on "
                        "weight_decay",
                    )
            jax.eval_shape(
                lambda g, s, p: self.apply(g, s, p, hyper, _OPS), weights, state, weights
            )
        except UserError:
            raise
        except Exception as error:
            what = (
                f"a step of {name} fails: {type(error).__name__}: "
                f"{f'{error}'.splitlines()[0] if f'{error}' else ''}"
            )
            raise UserError(
                what,
                self._where,
                "a transformation that only takes gradients, states and parameters",
            ) from error
        arrays = [array for arrays in state for array in arrays]
        if any(jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key) for array in arrays):
            raise UserError(
                f"{name} keeps a random key, which a checkpoint cannot store",
                self._where,
                "jax.random.PRNGKey(), an array",
            )
        if not self.function.has_rate:
            small = self._small()
            updates, _ = self._update(small, self.start(small), small, self._rate, decays=True)
            if sum(float(jnp.vdot(u, g)) for u, g in zip(updates, small, strict=True)) > 0:
                what = (
                    f"{name} has no parameter learning_rate, and its update would ascend the "
                    "gradient"
                )
                raise UserError(
                    what,
                    self._where,
                    "end it with optax.scale(-1.0), or give it a parameter learning_rate",
                )


Path = tuple[Any, ...]  # path of an array in a tree


def owner_of(path: Path, paths: Sequence[Path]) -> int | None:
    """Returns the number of the parameter that an array of the state belongs to: the one of `paths`
    with which its path ends."""
    fitting = [number for number, own in enumerate(paths) if path[-len(own) :] == own]
    return max(fitting, key=lambda number: len(paths[number]), default=None)


def name_of_other(path: Path) -> str:
    """Returns the name of a state array that belongs to no parameter: its path after "s. ". No
    parameter name begins with a space."""
    return f"s. {jax.tree_util.keystr(path, simple=True, separator='.')}"
