"""Tensors of TensorFlow, JAX and Keras: detects their library, unwraps variables, and provides the
operations that collectives need.

Imports none of these libraries: a tensor of one can only exist if the script has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def tensorflow() -> Any:
    """Returns the module tensorflow if it is imported, else None."""
    return sys.modules.get("tensorflow")


def as_written(function: F) -> F:
    """Marks a function so that AutoGraph does not translate it in a tf.function. Does not import
    TensorFlow."""
    function.autograph_info__ = {}  # type: ignore[attr-defined]  # the mark of tf.autograph.experimental.do_not_convert()
    return function


def is_of_tensorflow(tensors: Sequence[Any]) -> bool:
    """Whether one of them is a tensor, a variable or slices of TensorFlow; does not import it."""
    tf = tensorflow()
    return tf is not None and any(
        isinstance(tensor, (tf.Tensor, tf.Variable, tf.IndexedSlices)) for tensor in tensors
    )


def is_traced_by_jax(tensors: Sequence[Any]) -> bool:
    """Whether one of them is a JAX tracer, which replaces an array while JAX compiles or
    differentiates; does not import JAX."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


def value_of(variable: Any) -> Any:
    """Returns the tensor in a variable of Keras or TensorFlow; anything else is returned
    unchanged."""
    keras = sys.modules.get("keras")
    tf = tensorflow()
    if keras is not None and isinstance(variable, keras.Variable):
        return value_of(variable.value)
    return (
        tf.convert_to_tensor(variable)
        if tf is not None and isinstance(variable, tf.Variable)
        else variable
    )


def is_in_graph() -> bool:
    """Whether TensorFlow is currently building the graph of a function."""
    tf = tensorflow()
    return tf is not None and not tf.executing_eagerly()


class TensorLibrary(Protocol):
    """The operations on one tensor that gradients need besides collectives."""

    def cast(self, flags: Any, like: Any) -> Any:
        """Returns 1 where a flag is true, else 0, in the dtype of `like`."""

    def choose(self, flags: Any, tensor: Any) -> Any:
        """Returns the tensor's numbers where a flag is true, else 0, even for a nan. flags: with
        the tensor's shape, or a single one."""

    def constant(self, tensor: Any) -> Any:
        """Returns the tensor without its gradient."""

    def padded(self, tensor: Any, rows: Any) -> Any:
        """Returns the tensor with `rows` rows of zeros appended."""


def library_of(tensors: Sequence[Any]) -> TensorLibrary:
    return TensorFlow() if is_of_tensorflow(tensors) else Jax()


class TensorFlow:
    """Operations on tensors of TensorFlow."""

    def __init__(self) -> None:
        self._tf = sys.modules["tensorflow"]

    def cast(self, flags: Any, like: Any) -> Any:
        return self._tf.cast(flags, like.dtype)

    def choose(self, flags: Any, tensor: Any) -> Any:
        return self._tf.where(flags, tensor, self._tf.zeros_like(tensor))

    def constant(self, tensor: Any) -> Any:
        return self._tf.stop_gradient(tensor)

    def padded(self, tensor: Any, rows: Any) -> Any:
        return self._tf.pad(tensor, [[0, rows], *[[0, 0]] * (len(tensor.shape) - 1)])


class Jax:
    """Operations on arrays of JAX."""

    def __init__(self) -> None:
        self._jax = sys.modules["jax"]
        self._numpy = self._jax.numpy

    def cast(self, flags: Any, like: Any) -> Any:
        return flags.astype(like.dtype)

    def choose(self, flags: Any, tensor: Any) -> Any:
        return self._numpy.where(flags, tensor, self._numpy.zeros_like(tensor))

    def constant(self, tensor: Any) -> Any:
        return self._jax.lax.stop_gradient(tensor)

    def padded(self, tensor: Any, rows: int) -> Any:
        return self._numpy.pad(tensor, [(0, rows), *[(0, 0)] * (tensor.ndim - 1)])
