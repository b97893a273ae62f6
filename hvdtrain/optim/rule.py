"""Rule: an optimizer as two functions, init and update, over the arrays of any framework."""

from __future__ import annotations

from typing import Any, Protocol

from hvdtrain.core.progress import Hyper

# the array of a parameter, or a list of arrays, depending on the Ops; rules change it only by Ops,
# never by operators
Array = Any
# one number for each parameter, as a 0-d array or a vector; supports Python's operators and
# Ops.where
Scalar = Any


class Ops(Protocol):
    """The array operations of a rule. An argument with a capital letter may be overwritten: use the
    result instead.

    Factors `a` are Python numbers or Scalars; with a Python 0.0 nothing is computed. `axpy` is the
    name of BLAS.
    """

    def zeros_like(self, x: Array) -> Array: ...
    def zero(self, x: Array) -> Scalar:
        """Returns a Scalar of zeros in x's dtype, for a state with one number for each
        parameter."""

    def copy(self, x: Array) -> Array: ...
    def scale(self, a: Scalar | float, Y: Array) -> Array:
        """Computes a Y."""

    def axpy(self, a: Scalar | float, x: Array, Y: Array) -> Array:
        """Computes a x + Y."""

    def addcmul(self, a: float, x: Array, z: Array, Y: Array) -> Array:
        """Computes a x z + Y, elementwise."""

    def divide_by_sqrt(self, x: Array, v: Array, eps: float) -> Array:
        """Returns x / (sqrt(v) + eps), elementwise, as a new array."""

    def norm(self, x: Array) -> Scalar:
        """Returns the Euclidean norm of each parameter's array. It must not depend on another norm,
        so that one sum over ranks computes all of them."""

    def orthogonalize(self, x: Array, p: Array, rounds: int, eps: float, dtype: str) -> Array:
        """Returns newton_schulz() of each parameter's array x, with at least two dimensions, as a
        new array in x's dtype.

        p: the parameters; dtype: for the rounds, "bfloat16", or "" for x's dtype
        """

    def where(self, condition: Any, a: Scalar | float, b: Scalar | float) -> Scalar: ...
    def sqrt(self, a: Scalar) -> Scalar: ...
    def trusted(self, a: Scalar) -> Scalar:
        """Returns `a`, by which the rule multiplies the learning rate of each parameter. It may be
        recorded."""


class Rule(Protocol):
    """An optimizer's update rule. The state of each parameter is a tuple of arrays of the
    parameter's shape, or Scalars."""

    @property
    def momentum(self) -> float:
        """The default of optim.momentum."""

    def of_parameter(self, name: str, shape: tuple[int, ...], excluded: bool) -> Rule:
        """Returns the rule for one parameter: this rule, this rule without trust ratio if
        `excluded` (norms, biases), or another one."""

    def init(self, p: Array, ops: Ops) -> tuple[Any, ...]:
        """Returns the state before the first step."""

    def update(
        self, g: Array, state: tuple[Any, ...], P: Array, h: Hyper, ops: Ops
    ) -> tuple[Array, tuple[Any, ...]]:
        """Returns (new parameters, new state). g is the gradient of the mean loss and is not
        changed; P and the state may be overwritten."""


def newton_schulz(x: Array, rounds: int, eps: float, norm: Scalar) -> Array:
    """Approximates the orthogonal matrix nearest to x: `rounds` times x -> a x + (b x x' + c (x
    x')^2) x, from x / max(norm, eps) on.

    x: (..., out, in), a matrix or a stack of matrices; norm: the Euclidean norm. A tall matrix is
    transposed, which is cheaper. Source: Jordan 2024, kellerjordan.github.io/posts/muon, as in
    torch.optim.Muon.
    """
    a = 3.4445
    b = -4.7750
    c = 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = x.swapaxes(-1, -2) if tall else x
    x = x / norm.clip(eps)
    for _ in range(rounds):
        square = x @ x.swapaxes(-1, -2)
        x = a * x + (b * square + c * (square @ square)) @ x
    return x.swapaxes(-1, -2) if tall else x


class ArrayOps:
    """Ops on one array at a time, in numpy or jax.numpy; every result is a new array."""

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

    def divide_by_sqrt(self, x: Array, v: Array, eps: float) -> Array:
        return x / (self._xp.sqrt(v) + eps)

    def norm(self, x: Array) -> Scalar:
        return self._xp.sqrt((x * x).sum())

    def orthogonalize(self, x: Array, p: Array, rounds: int, eps: float, dtype: str) -> Array:
        # a flattened part of a matrix would be orthogonalized separately, with wrong results
        assert x.ndim >= 2, x.shape
        matrix = x.reshape(x.shape[0], -1).astype(dtype or x.dtype)  # (out, in kh kw)
        return (
            newton_schulz(matrix, rounds, eps, self.norm(matrix)).astype(x.dtype).reshape(x.shape)
        )

    def where(self, condition: Any, a: Scalar | float, b: Scalar | float) -> Scalar:
        return self._xp.where(condition, a, b)

    def sqrt(self, a: Scalar) -> Scalar:
        return self._xp.sqrt(a)

    def trusted(self, a: Scalar) -> Scalar:
        return a


def is_excluded(shape: tuple[int, ...]) -> bool:
    """Whether a parameter counts as a norm or bias, because it has at most one dimension; then it
    has no weight decay or trust ratio."""
    return len(shape) <= 1
