"""Work in host memory on tensors of any library: at once, or each time that a function runs which TensorFlow or JAX has compiled."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from hvdtrain.horovod.engine.errors import BadCall

IN_GRAPH = "hvdtrain_calls_the_host_so_set_jit_compile_False"  # the node that TensorFlow names where XLA should compile it
FAILURES: list[BaseException] = []  # the last error of a call within a compiled function, whose library raises another one for it
Shape = Sequence[int | None]  # None: known once the function runs
Work = Callable[[list[Any]], Sequence[Any]]
F = TypeVar("F", bound=Callable[..., Any])


def on_host(work: Work, tensors: Sequence[Any], shapes: Sequence[Shape] | None = None) -> list[Any]:
    """The results of work(tensors), which have the dtypes of the first tensors.

    shapes: of the results; None where there is one for each tensor, of its shape. Inside of a compiled function work() gets and returns
    arrays of NumPy, in the order of the program; elsewhere it gets the tensors themselves. TensorFlow cannot compile it by XLA, and JAX
    has to know shapes.
    """
    shapes = [tensor.shape for tensor in tensors] if shapes is None else shapes
    if is_of_tensorflow(tensors) and not _tensorflow().executing_eagerly():
        return _within_tensorflow(work, tensors, shapes)
    if is_traced_by_jax(tensors):
        return _within_jax(work, tensors, shapes)
    return list(work(list(tensors)))


def as_written(function: F) -> F:
    """The function, which a tf.function calls as it is: AutoGraph does not translate it. Without importing TensorFlow for it."""
    function.autograph_info__ = {}  # type: ignore[attr-defined]  # the mark of tf.autograph.experimental.do_not_convert()
    return function


def is_of_tensorflow(tensors: Sequence[Any]) -> bool:
    """Whether one of them is a tensor, a variable or slices of TensorFlow; does not import it."""
    tf = _tensorflow()
    return tf is not None and any(isinstance(tensor, (tf.Tensor, tf.Variable, tf.IndexedSlices)) for tensor in tensors)


def is_traced_by_jax(tensors: Sequence[Any]) -> bool:
    """Whether one of them is what JAX puts in place of an array while it compiles or differentiates; does not import it."""
    jax = sys.modules.get("jax")
    return jax is not None and any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


def value_of(variable: Any) -> Any:
    """The tensor in a variable of Keras or TensorFlow; what is no variable is returned."""
    keras, tf = sys.modules.get("keras"), _tensorflow()
    if keras is not None and isinstance(variable, keras.Variable):
        return value_of(variable.value)
    return tf.convert_to_tensor(variable) if tf is not None and isinstance(variable, tf.Variable) else variable


def give_jax_two_threads() -> None:
    """So that JAX can hand arrays to the work: on one core it has one thread, which would run the function and wait for them.

    Raises BadCall where it is too late.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > 1 or "NPROC" in os.environ:
        return
    import jax

    if jax._src.xla_bridge.backends_are_initialized():
        what = "JAX has computed before hvd.init(), and has one thread on this core: a function that waits for ranks would hang"
        raise BadCall(what, "hvd.init()", "hvd.init() before the model is made; or mpirun --bind-to none")
    os.environ["NPROC"] = "2"  # which XLA reads once it begins


def _tensorflow() -> Any:
    return sys.modules.get("tensorflow")


def _within_tensorflow(work: Work, tensors: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
    tf = _tensorflow()
    dtypes = [tensor.dtype for tensor, _ in zip(tensors, shapes, strict=False)]
    results = tf.numpy_function(_on_arrays(work), list(tensors), dtypes, name=IN_GRAPH)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def _within_jax(work: Work, tensors: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
    import jax
    from jax.experimental import io_callback

    forms = [jax.ShapeDtypeStruct(shape, tensor.dtype) for shape, tensor in zip(shapes, tensors, strict=False)]
    return list(io_callback(_on_arrays(work), forms, *tensors, ordered=True))


def _on_arrays(work: Work) -> Callable[..., list[np.ndarray]]:
    """The work as a function of arrays, of which none is memory of the library's."""

    def call(*arrays: Any) -> list[np.ndarray]:
        try:
            return [np.asarray(result) for result in work([np.array(array) for array in arrays])]
        except BaseException as error:
            FAILURES[:] = [error]
            raise

    return call
