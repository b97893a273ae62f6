"""The calls of horovod.tensorflow, with its arguments: on tensors, variables and slices of
TensorFlow, also inside of a tf.function.

Names are used as they are, whatever ignore_name_scope says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from hvdtrain.horovod import basics, objects
from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average, Compression, Compressor, given_op
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.traced import collectives
from hvdtrain.horovod.traced.gradient_reduction import (
    check_slices,
    reduce_slices,
    refuse_placements,
)
from hvdtrain.horovod.traced.variables import broadcast_variables


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Returns the reduction over ranks; tf.IndexedSlices are summed or averaged as the slices of
    all ranks, without compression and factors.

    op: Average (default), Sum, Min, Max, Product or Adasum; `average` is a former name of it.
    """
    refuse_placements("hvd.allreduce()", device_dense=device_dense, device_sparse=device_sparse)
    op = given_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        check_slices(op, prescale_factor, postscale_factor, "hvd.allreduce()")
        return reduce_slices([tensor], op, name=name, process_set=process_set)[0]
    factors: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return collectives.allreduce(
        [_tensor(tensor)],
        op,
        name=name,
        compression=compression,
        process_set=process_set,
        **factors,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Runs allreduce() on several tensors: the dense tensors as one request, the tf.IndexedSlices
    as two."""
    refuse_placements(
        "hvd.grouped_allreduce()", device_dense=device_dense, device_sparse=device_sparse
    )
    factors: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    op = given_op(op, average)
    slices = [each for each in tensors if isinstance(each, tf.IndexedSlices)]
    dense = [_tensor(each) for each in tensors if not isinstance(each, tf.IndexedSlices)]
    if slices:
        check_slices(op, prescale_factor, postscale_factor, "hvd.grouped_allreduce()")
        slices = reduce_slices(slices, op, name=name and f"{name}.slices", process_set=process_set)
    if dense:
        dense = collectives.allreduce(
            dense, op, name=name, compression=compression, process_set=process_set, **factors
        )
    return [(slices if isinstance(each, tf.IndexedSlices) else dense).pop(0) for each in tensors]


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Returns this rank's rows of the reduction over ranks: equally many, the first ranks one
    more."""
    return grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        name,
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Runs reducescatter() on several tensors as one request."""
    refuse_placements("hvd.reducescatter()", device_dense=device_dense)
    factors: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
    return collectives.reducescatter(
        [_tensor(each) for each in tensors],
        op,
        name=name,
        compression=compression,
        process_set=process_set,
        **factors,
    )


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the tensors of all ranks along axis 0, whose lengths may differ."""
    return collectives.allgather([_tensor(tensor)], name=name, process_set=process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Runs allgather() on several tensors as one request."""
    return collectives.allgather(
        [_tensor(each) for each in tensors], name=name, process_set=process_set
    )


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the tensor of rank `root_rank`."""
    return collectives.broadcast(_tensor(tensor), root_rank, name=name, process_set=process_set)


def broadcast_(
    variables: Iterable[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Sets the variables to their values on rank `root_rank` and returns them."""
    received = list(variables)
    broadcast_variables(received, root_rank, process_set)
    return received


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the rows that every rank sends to this one; (rows, received splits) if splits are
    given."""
    return collectives.alltoall(_tensor(tensor), splits, name=name, process_set=process_set)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the object of rank `root_rank`, as data: hvdtrain.horovod.broadcast_object()."""
    _refuse_session(session, "hvd.broadcast_object()")
    return objects.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns broadcast_object() with this root."""
    _refuse_session(session, "hvd.broadcast_object_fn()")
    return lambda obj: objects.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Returns the objects of all ranks, as data."""
    _refuse_session(session, "hvd.allgather_object()")
    return objects.allgather_object(obj, name, process_set)


def rank_op(name: str | None = None) -> Any:
    """rank() as an int32 tensor, evaluated when a tf.function runs; it may change after an elastic
    reset."""
    return _number(basics.rank)


def local_rank_op(name: str | None = None) -> Any:
    """local_rank() as an int32 tensor."""
    return _number(basics.local_rank)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns the ranks of the process set as an int32 tensor."""
    return _number(lambda: len(JOB.engine.ranks_of(process_set_id)))


def local_size_op(name: str | None = None) -> Any:
    """local_size() as an int32 tensor."""
    return _number(basics.local_size)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns 1 if this rank is in the process set, else 0, as an int32 tensor."""
    return _number(lambda: JOB.engine.rank in JOB.engine.ranks_of(process_set_id))


def _number(value: Callable[[], int]) -> Any:
    if tf.executing_eagerly():
        return tf.constant(int(value()), tf.int32)
    number = tf.numpy_function(lambda: np.int32(value()), [], tf.int32)
    number.set_shape(())
    return number


def BroadcastGlobalVariablesHook(root_rank: int, device: str = "") -> NoReturn:
    """Raises BadCall: there is no session to hook into."""
    what = "a SessionRunHook belongs to TensorFlow 1"
    raise BadCall(
        what,
        "hvd.BroadcastGlobalVariablesHook()",
        "hvd.broadcast_variables(variables, root_rank=0) after the first step",
    )


def _tensor(value: Any) -> Any:
    """Converts numbers, lists and NumPy arrays to tensors; other values with a shape are
    unchanged."""
    is_tensor = hasattr(value, "shape") and not isinstance(value, (np.ndarray, np.generic))
    return value if is_tensor else tf.convert_to_tensor(value)


def _refuse_session(session: Any, where: str) -> None:
    if session is not None:
        raise BadCall("a session belongs to TensorFlow 1", where, "the call without session")
