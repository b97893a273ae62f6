"""Rule: an optimizer as a pair of functions over arrays of any framework, written against a handful of array operations."""

from __future__ import annotations

from typing import Any, Protocol

from hvdtrain.core.progress import Hyper

Array = Any  # the arrays of one or more parameters, as the Ops at hand take them: touched by Ops alone, never by operators
Scalar = Any  # one number for each parameter (a 0-d array, or a row of them): plain operators and Ops.where work on it


class Ops(Protocol):
    """What a rule may do to arrays. A capital Y may be overwritten and must not be used again: take the result.

    Factors `a` are Python numbers or Scalars; a Python 0.0 costs nothing. `axpy` and `scale` are BLAS's words.
    """

    def zeros_like(self, x: Array) -> Array: ...
    def zero(self, x: Array) -> Scalar:
        """A Scalar of zeros in x's dtype, for slots that hold one number for each parameter."""

    def copy(self, x: Array) -> Array: ...
    def scale(self, a: Scalar | float, Y: Array) -> Array:
        """a Y"""

    def axpy(self, a: Scalar | float, x: Array, Y: Array) -> Array:
        """a x + Y"""

    def addcmul(self, a: float, x: Array, z: Array, Y: Array) -> Array:
        """a x z + Y, elementwise"""

    def over_root(self, x: Array, v: Array, eps: float) -> Array:
        """x / (sqrt(v) + eps), elementwise, in new memory"""

    def norm(self, x: Array) -> Scalar:
        """The Euclidean norm of each parameter's array."""

    def where(self, condition: Any, a: Scalar | float, b: Scalar | float) -> Scalar: ...
    def sqrt(self, a: Scalar) -> Scalar: ...


class Rule(Protocol):
    """How parameters move. `slots` is what the rule remembers of each: arrays of its shape, or Scalars."""

    @property
    def momentum(self) -> float:
        """Hyper.momentum where the user names none."""

    def without_trust_ratio(self) -> Rule:
        """The rule for norms and biases, whose step no layer-wise ratio scales: itself where there is no such ratio."""

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        """The slots before the first step."""

    def update(self, g: Array, optimizer_state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops) -> tuple[Array, tuple[Any, ...]]:
        """(new parameters, new slots); g is the gradient of the mean loss and stays as it is, P and the slots may be overwritten."""


class Plain:
    """Ops of one array at a time in numpy or jax.numpy: everything in new memory."""

    def __init__(self, xp: Any) -> None:
        self._xp = xp

    def zeros_like(self, x: Array) -> Array:
        return self._xp.zeros_like(x)

    def zero(self, x: Array) -> Scalar:
        return self._xp.zeros((), x.dtype)

    def copy(self, x: Array) -> Array:
        return x

    def scale(self, a: Scalar | float, Y: Array) -> Array:
        return a * Y

    def axpy(self, a: Scalar | float, x: Array, Y: Array) -> Array:
        return a * x + Y

    def addcmul(self, a: float, x: Array, z: Array, Y: Array) -> Array:
        return a * x * z + Y

    def over_root(self, x: Array, v: Array, eps: float) -> Array:
        return x / (self._xp.sqrt(v) + eps)

    def norm(self, x: Array) -> Scalar:
        return self._xp.sqrt((x * x).sum())

    def where(self, condition: Any, a: Scalar | float, b: Scalar | float) -> Scalar:
        return self._xp.where(condition, a, b)

    def sqrt(self, a: Scalar) -> Scalar:
        return self._xp.sqrt(a)


def is_excluded(shape: tuple[int, ...]) -> bool:
    """Whether a parameter counts as a norm's or a bias: it has at most one dimension. No decay and no layer-wise ratio for these."""
    return len(shape) <= 1
