"""The collectives of hvdtrain.horovod on tensors of TensorFlow, JAX and Keras: in compiled functions too, and with gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.horovod import collectives, reductions
from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average, Compression, Compressor, Sum, synchronize
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.traced.on_host import Shape, Work, as_written, is_of_tensorflow, is_traced_by_jax, on_host, value_of

Gradients = Callable[[list[Any], Sequence[Any]], list[Any]]  # of the results, and the tensors -> of the tensors


@as_written
def allreduce(
    tensors: Sequence[Any],
    op: int = Average,
    *,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """The reductions over ranks, as one request. The gradient of a sum or an average is the same reduction."""

    def reduce(given: list[Any]) -> Sequence[Any]:
        factors: dict[str, Any] = {"prescale_factor": prescale, "postscale_factor": postscale}
        return reductions.grouped_allreduce(given, name=name, compression=compression, op=op, process_set=process_set, **factors)

    def gradients(grads: list[Any], _: Sequence[Any]) -> list[Any]:
        _check_gradient(op, "allreduce", name)
        how: dict[str, Any] = {"compression": compression, "prescale": prescale, "postscale": postscale, "process_set": process_set}
        return allreduce(grads, op, name=_of_gradient(name), **how)

    return _call(reduce, tensors, None, gradients)


@as_written
def allgather(tensors: Sequence[Any], *, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The rows of all ranks, as one request; the gradient is its sum over ranks. JAX compiles it where ranks have equally many rows."""
    found = [value_of(tensor) for tensor in tensors]
    size = process_set.size() or 1

    def gather(given: list[Any]) -> Sequence[Any]:
        return collectives.grouped_allgather(given, name, process_set)

    def gradients(grads: list[Any], given: Sequence[Any]) -> list[Any]:
        summed = allreduce(grads, Sum, name=_of_gradient(name), process_set=process_set)
        return on_host(cut, [*summed, *given], [tensor.shape for tensor in given])

    def cut(both: list[Any]) -> list[Any]:
        """The rows of this rank. both: gradients of all rows, and the tensors of this rank."""
        summed, own = both[: len(found)], both[len(found) :]
        lengths = collectives.allgather(_lengths(own), None, process_set)  # (ranks, tensors)
        starts = lengths[: process_set.rank()].sum(0).tolist()
        return [grad[start : start + len(tensor)] for grad, start, tensor in zip(summed, starts, own, strict=True)]

    return _call(gather, found, [_with_rows(tensor, lambda rows: rows * size) for tensor in found], gradients)


@as_written
def broadcast(tensor: Any, root_rank: int, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The tensor of rank `root_rank`, whose gradient is the sum over ranks."""

    def send(given: list[Any]) -> list[Any]:
        return [collectives.broadcast(given[0], root_rank, name, process_set)]

    def gradients(grads: list[Any], _: Sequence[Any]) -> list[Any]:
        (summed,) = allreduce(grads, Sum, name=_of_gradient(name), process_set=process_set)
        return [summed if JOB.engine.rank == root_rank else summed * 0]

    return _call(send, [tensor], None, gradients)[0]


@as_written
def alltoall(tensor: Any, splits: Any = None, *, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The rows that every rank sends to this one; where splits are given, (rows, received splits). The gradient takes the way back."""
    tensor = value_of(tensor)
    if is_of_tensorflow([tensor]):
        found, received = _alltoall_of_tensorflow(tensor, splits, name, process_set)
        return found if splits is None else (found, received)
    if splits is not None:
        return collectives.alltoall(tensor, splits, name, process_set)

    def send(given: list[Any]) -> list[Any]:
        return [collectives.alltoall(given[0], None, name, process_set)]

    def gradients(grads: list[Any], _: Sequence[Any]) -> list[Any]:
        return [alltoall(grads[0], name=_of_gradient(name), process_set=process_set)]

    return _call(send, [tensor], None, gradients)[0]


def _alltoall_of_tensorflow(tensor: Any, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
    tf = sys.modules["tensorflow"]

    def send(given: list[Any]) -> list[Any]:
        rows, numbers = given
        handle = collectives.alltoall_async(rows, None if splits is None else [int(n) for n in numbers], name, process_set)
        found, received = synchronize(handle)
        return [found, received.numpy()]

    @tf.custom_gradient
    def call(rows: Any, numbers: Any) -> Any:
        found, received = on_host(send, [rows, numbers], [_with_rows(rows, lambda _: None), [None]])

        def gradient(grad: Any, _: Any) -> list[Any]:
            sent, _ = _alltoall_of_tensorflow(grad, received, _of_gradient(name), process_set)
            unsent = [[0, tf.shape(rows)[0] - tf.shape(sent)[0]], *[[0, 0]] * (len(rows.shape) - 1)]
            return [tf.pad(sent, unsent), None]

        return (found, received), gradient

    return call(tensor, tf.cast([] if splits is None else splits, tf.int32))


@as_written
def reducescatter(
    tensors: Sequence[Any],
    op: int = Average,
    *,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """This rank's rows of reductions over ranks, as one request; the gradient gathers those of all ranks."""
    found = [value_of(tensor) for tensor in tensors]
    size = process_set.size() or 1

    def reduce(given: list[Any]) -> Sequence[Any]:
        factors: dict[str, Any] = {"prescale_factor": prescale, "postscale_factor": postscale}
        return collectives.grouped_reducescatter(given, name, compression, op, process_set, **factors)

    def gradients(grads: list[Any], _: Sequence[Any]) -> list[Any]:
        _check_gradient(op, "reducescatter", name)
        factor = prescale * postscale * (size if op == Sum else 1)
        return allgather([grad * factor for grad in grads], name=_of_gradient(name), process_set=process_set)

    def rows_here(rows: int) -> int:
        return rows // size + ((process_set.rank() or 0) < rows % size)

    return _call(reduce, found, [_with_rows(tensor, rows_here) for tensor in found], gradients)


def _call(work: Work, tensors: Sequence[Any], shapes: Sequence[Shape] | None, gradients: Gradients) -> list[Any]:
    """The results of work(), with these gradients for TensorFlow, and for JAX in what it traces. torch has its own."""
    found = [value_of(tensor) for tensor in tensors]
    if is_of_tensorflow(found):
        return _with_gradients_of_tensorflow(work, found, shapes, gradients)
    if is_traced_by_jax(found):
        return _with_gradients_of_jax(work, found, shapes, gradients)
    return on_host(work, found, shapes)


def _with_gradients_of_tensorflow(work: Work, tensors: Sequence[Any], shapes: Sequence[Shape] | None, gradients: Gradients) -> list[Any]:
    @sys.modules["tensorflow"].custom_gradient
    def call(*given: Any) -> Any:
        return tuple(on_host(work, given, shapes)), lambda *grads: gradients(list(grads), given)

    return list(call(*tensors))


def _with_gradients_of_jax(work: Work, tensors: Sequence[Any], shapes: Sequence[Shape] | None, gradients: Gradients) -> list[Any]:
    def forward(*given: Any) -> tuple[Any, Any]:
        return tuple(on_host(work, given, shapes)), given

    call = sys.modules["jax"].custom_vjp(lambda *given: forward(*given)[0])
    call.defvjp(forward, lambda given, grads: tuple(gradients(list(grads), given)))
    return list(call(*tensors))


def _with_rows(tensor: Any, rows_of: Callable[[int], int | None]) -> Shape:
    """The shape with rows_of(rows) rows; a tensor of TensorFlow may have another number of rows on each rank."""
    if is_of_tensorflow([tensor]):
        return sys.modules["tensorflow"].TensorShape([None]).concatenate(tensor.shape[1:])
    return (rows_of(tensor.shape[0]), *tensor.shape[1:]) if tensor.ndim else ()


def _lengths(tensors: Sequence[Any]) -> Any:
    return np.array([[len(tensor) for tensor in tensors]])


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _check_gradient(op: int, kind: str, name: str | None) -> None:
    if op not in (Average, Sum):
        raise BadCall(f"gradients go through {kind} of Average or Sum alone", f"{kind} {name!r}", "op=hvd.Average or hvd.Sum")
