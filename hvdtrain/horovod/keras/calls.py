"""The calls of horovod.keras: on arrays and on tensors of Keras' backend, also inside of a compiled
train_step()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvdtrain.horovod import basics
from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average, Compression, Compressor, given_op
from hvdtrain.horovod.libraries import is_in_graph
from hvdtrain.horovod.traced import collectives
from hvdtrain.horovod.traced.on_host import give_jax_two_threads


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Connects the ranks that a launcher has started, as hvdtrain.horovod.init() does."""
    if keras.backend.backend() == "jax":
        give_jax_two_threads()
    basics.init(comm, process_sets)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the reduction over ranks. op: Average (default), Sum, Min, Max or Product; `average`
    is the deprecated argument."""
    (reduced,) = collectives.allreduce(
        [_tensor(value)],
        given_op(op, average),
        name=name,
        compression=compression,
        prescale=prescale_factor,
        postscale=postscale_factor,
        process_set=process_set,
    )
    return reduced


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the values of all ranks, concatenated along axis 0. Lengths may differ, except in a
    function that JAX compiles."""
    return collectives.allgather([_tensor(value)], name=name, process_set=process_set)[0]


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the value of rank `root_rank`."""
    return collectives.broadcast(_tensor(value), root_rank, name=name, process_set=process_set)


def alltoall(
    value: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the rows that every rank sends to this one; (rows, received splits) if splits are
    given."""
    return collectives.alltoall(_tensor(value), splits, name=name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Returns this rank's rows of the reduction over ranks."""
    factors: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return collectives.reducescatter(
        [_tensor(value)], op, name=name, process_set=process_set, **factors
    )[0]


def _tensor(value: Any) -> Any:
    """Converts numbers and lists to tensors of the backend; values with a shape stay as they are,
    except within a tf.function."""
    is_array = isinstance(value, (np.ndarray, np.generic))
    if hasattr(value, "shape") and not (
        is_array and is_in_graph()
    ):  # in a graph the call would run only once, when the graph is built
        return value
    return keras.ops.convert_to_tensor(value)
