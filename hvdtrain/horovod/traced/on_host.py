"""Runs work in host memory on tensors of any library: at once, or each time that a function
compiled by TensorFlow or JAX runs."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.libraries import is_of_tensorflow, is_traced_by_jax, tensorflow

# appended to the call in the node's name, which TensorFlow's errors contain
IN_GRAPH = "runs_on_the_host_without_XLA"
FAILURES: list[
    BaseException
] = []  # the last error of a call within a compiled function, whose library raises another one for it  # noqa: E501
Shape = Sequence[int | None]  # None: known once the function runs
Work = Callable[[list[Any]], Sequence[Any]]


def on_host(
    work: Work, tensors: Sequence[Any], shapes: Sequence[Shape] | None = None, *, call: str
) -> list[Any]:
    """Returns the results of work(tensors), which have the dtypes of the first tensors.

    shapes: of the results; None if there is one result for each tensor, of its shape. call: the
    name in errors of a tf.function.

    Inside of a compiled function, work() gets and returns NumPy arrays, in program order; elsewhere
    it gets the tensors themselves. TensorFlow cannot compile it with XLA, and JAX must know the
    shapes.
    """
    shapes = [tensor.shape for tensor in tensors] if shapes is None else shapes
    if is_of_tensorflow(tensors) and not tensorflow().executing_eagerly():
        return _within_tensorflow(work, tensors, shapes, call)
    if is_traced_by_jax(tensors):
        return _within_jax(work, tensors, shapes)
    return list(work(list(tensors)))


def give_jax_two_threads() -> None:
    """Gives JAX two threads, so that it can pass arrays to the work: on one core it has one thread,
    which would run the function and wait for them.

    Raises BadCall if it is too late.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    if cores > 1 or "NPROC" in os.environ:
        return
    import jax

    if jax._src.xla_bridge.backends_are_initialized():
        what = (
            "JAX was used before hvd.init() and has only one thread on this core, so a function "
            "that waits for ranks would hang"
        )
        raise BadCall(
            what,
            "hvd.init()",
            "call hvd.init() before the model is created; or mpirun --bind-to none",
        )
    os.environ["NPROC"] = "2"  # which XLA reads once it begins


def _within_tensorflow(
    work: Work, tensors: Sequence[Any], shapes: Sequence[Shape], call: str
) -> list[Any]:
    tf = tensorflow()
    node = re.sub("[^A-Za-z0-9_.]+", "_", f"hvdtrain {call} {IN_GRAPH}")
    dtypes = [tensor.dtype for tensor, _ in zip(tensors, shapes, strict=False)]
    results = tf.numpy_function(_on_arrays(work), list(tensors), dtypes, name=node)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def _within_jax(work: Work, tensors: Sequence[Any], shapes: Sequence[Shape]) -> list[Any]:
    import jax
    from jax.experimental import io_callback

    forms = [
        jax.ShapeDtypeStruct(shape, tensor.dtype)
        for shape, tensor in zip(shapes, tensors, strict=False)
    ]
    return list(io_callback(_on_arrays(work), forms, *tensors, ordered=True))


def _on_arrays(work: Work) -> Callable[..., list[np.ndarray]]:
    """Returns the work as a function of arrays that do not share the library's memory."""

    def call(*arrays: Any) -> list[np.ndarray]:
        try:
            return [np.asarray(result) for result in work([np.array(array) for array in arrays])]
        except BaseException as error:
            FAILURES[:] = [error]
            raise

    return call
