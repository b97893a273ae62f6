"""The collectives of hvdtrain.horovod on tensors of TensorFlow, JAX and Keras: in compiled
functions too, and with gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.horovod import collectives, gradients, reductions
from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Average, Compression, Compressor, Max, Min, Product, synchronize
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.libraries import (
    as_written,
    is_of_tensorflow,
    is_traced_by_jax,
    library_of,
    value_of,
)
from hvdtrain.horovod.traced.on_host import Shape, Work, on_host

# of the gradients of the results, the tensors, and the results -> the gradients of the tensors
Gradients = Callable[[list[Any], Sequence[Any], Sequence[Any]], list[Any]]


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
    """Returns the reductions over ranks, as one request."""
    call = _title("allreduce", name)
    factors = prescale, postscale

    def work(given: list[Any]) -> Sequence[Any]:
        how: dict[str, Any] = {
            "prescale_factor": prescale,
            "postscale_factor": postscale,
            "process_set": process_set,
        }
        return reductions.grouped_allreduce(given, name=name, op=op, **how)

    def of_inputs(grads: list[Any], given: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        shares = None
        if op == Product:  # a separate call: the second derivative goes through its result
            results = allreduce(
                given,
                op,
                name=_of_gradient(name),
                prescale=prescale,
                postscale=postscale,
                process_set=process_set,
            )
        if op in (Min, Max, Product):
            shares = gradients.shares(op, factors, given, results)
        library = library_of(grads)
        gradients_of_inputs = gradients.of_allreduce(
            op, factors, grads, shares, _reduce_over(process_set, name), library
        )
        if op == Product:
            on_host(check_inputs, [library.constant(x) for x in given], call=call)
        return gradients_of_inputs

    def check_inputs(given: list[Any]) -> list[Any]:
        gradients.refuse_zeros(any(bool((np.asarray(x) == 0).any()) for x in given), call)
        return given

    compressed = [compression.compress(value_of(tensor)) for tensor in tensors]
    found = _call(call, work, [wire for wire, _ in compressed], None, of_inputs)
    return [
        compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(found, compressed, strict=True)
    ]


@as_written
def allgather(
    tensors: Sequence[Any],
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    totals: Sequence[int] = (),
) -> list[Any]:
    """Returns the rows of all ranks, as one request. JAX can compile it if all ranks have the same
    number of rows.

    totals: of rows, for JAX, if the rows are shares of a total, as after reducescatter().
    """
    call = _title("allgather", name)
    values = [value_of(tensor) for tensor in tensors]
    size = process_set.size() or 1

    def work(given: list[Any]) -> Sequence[Any]:
        gathered = collectives.grouped_allgather(given, name, process_set)
        if is_traced_by_jax(values):
            _check_rows(given, gathered, totals, size, call)
        return gathered

    def of_inputs(grads: list[Any], given: Sequence[Any], _: Sequence[Any]) -> list[Any]:
        starts, rows = _places(grads, given, call, process_set)
        return gradients.of_allgather(grads, starts, rows, _reduce_over(process_set, name))

    shapes = [_with_rows(tensor, lambda rows: rows * size) for tensor in values]
    if totals and not is_of_tensorflow(values):
        shapes = [
            _with_rows(tensor, lambda _, total=total: total)  # type: ignore[misc]
            for tensor, total in zip(values, totals, strict=True)
        ]
    return _call(call, work, values, shapes, of_inputs)


def _places(
    grads: Sequence[Any], tensors: Sequence[Any], call: str, process_set: ProcessSet
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the first row of this rank among the rows of all ranks, and their number, for each
    tensor."""
    if not is_of_tensorflow(
        tensors
    ):  # traced by JAX: equal shares, the first ranks with one row more
        rank = process_set.rank() or 0
        size = process_set.size() or 1
        totals = [grad.shape[0] for grad in grads]
        return [rank * (total // size) + min(rank, total % size) for total in totals], [
            tensor.shape[0] for tensor in tensors
        ]
    tf = sys.modules["tensorflow"]

    def starts(given: list[Any]) -> list[Any]:
        # (ranks, tensors)
        lengths = collectives.allgather(np.asarray(given[0])[None], None, process_set)
        return [lengths[: process_set.rank()].sum(0, dtype=lengths.dtype)]

    counts = tf.stack([tf.shape(tensor)[0] for tensor in tensors])
    (begins,) = on_host(starts, [counts], call=call)
    return tf.unstack(tf.convert_to_tensor(begins), len(tensors)), tf.unstack(counts, len(tensors))


def _check_rows(
    tensors: Sequence[Any], gathered: Sequence[Any], totals: Sequence[int], size: int, call: str
) -> None:
    """Raises BadCall, on at least one rank, if numbers of rows differ from what JAX traced."""
    for own, rows, total in zip(
        tensors, gathered, totals or [size * len(own) for own in tensors], strict=True
    ):
        if len(rows) != total:
            what = (
                f"this rank has {len(own)} of {len(rows)} rows, but in a call that JAX traces "
                f"each of {size} ranks needs the same number"
            )
            raise BadCall(
                what, call, "call it outside jax.jit() and jax.grad(), or add rows of zeros"
            )


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the tensor of rank `root_rank`."""

    def work(given: list[Any]) -> list[Any]:
        return [collectives.broadcast(given[0], root_rank, name, process_set)]

    def of_inputs(grads: list[Any], _: Sequence[Any], __: Sequence[Any]) -> list[Any]:
        is_root = JOB.engine.rank == root_rank
        return [
            gradients.of_broadcast(
                grads[0], is_root, _reduce_over(process_set, name), library_of(grads)
            )
        ]

    return _call(_title("broadcast", name), work, [tensor], None, of_inputs)[0]


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    *,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the rows that every rank sends to this one; (rows, received splits) if splits are
    given."""
    tensor = value_of(tensor)
    call = _title("alltoall", name)
    if is_of_tensorflow([tensor]):
        found, received = _alltoall_of_tensorflow(tensor, splits, name, process_set)
        return found if splits is None else (found, received)
    if splits is not None and is_traced_by_jax([tensor]):
        what = (
            "JAX traces this call, but the number of rows from other ranks is unknown during "
            "tracing"
        )
        raise BadCall(
            what,
            call,
            "call it outside jax.jit() and jax.grad(), or use equal parts without splits",
        )
    if splits is not None:
        return collectives.alltoall(tensor, splits, name, process_set)

    def work(given: list[Any]) -> list[Any]:
        return [collectives.alltoall(given[0], None, name, process_set)]

    def of_inputs(grads: list[Any], _: Sequence[Any], __: Sequence[Any]) -> list[Any]:
        def exchange(grad: Any, received: Any) -> Any:
            return alltoall(grad, received, name=_of_gradient(name), process_set=process_set)

        return [gradients.of_alltoall(grads[0], None, None, exchange, library_of(grads))]

    return _call(call, work, [tensor], None, of_inputs)[0]


def _alltoall_of_tensorflow(
    tensor: Any, splits: Any, name: str | None, process_set: ProcessSet
) -> Any:
    tf = sys.modules["tensorflow"]

    def work(given: list[Any]) -> list[Any]:
        rows, numbers = given
        handle = collectives.alltoall_async(
            rows, None if splits is None else [int(n) for n in numbers], name, process_set
        )
        found, received = synchronize(handle)
        return [
            found,
            tf.constant(received.numpy()) if is_of_tensorflow([rows]) else received.numpy(),
        ]

    @tf.custom_gradient
    def call(rows: Any, numbers: Any) -> Any:
        shapes: list[Shape] = [_with_rows(rows, lambda _: None), [None]]
        found, received = on_host(work, [rows, numbers], shapes, call=_title("alltoall", name))

        def exchange(grad: Any, sent: Any) -> Any:
            return _alltoall_of_tensorflow(grad, sent, _of_gradient(name), process_set)[0]

        def of_inputs(grad: Any, _: Any) -> list[Any]:
            unsent = None if splits is None else tf.shape(rows)[0] - tf.reduce_sum(numbers)
            return [
                gradients.of_alltoall(grad, received, unsent, exchange, library_of([grad])),
                None,
            ]

        return (found, received), of_inputs

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
    """Returns this rank's rows of reductions over ranks, as one request."""
    call = _title("reducescatter", name)
    size = process_set.size() or 1

    def work(given: list[Any]) -> Sequence[Any]:
        how: dict[str, Any] = {"prescale_factor": prescale, "postscale_factor": postscale}
        return collectives.grouped_reducescatter(given, name, op=op, process_set=process_set, **how)

    def of_inputs(grads: list[Any], _: Sequence[Any], __: Sequence[Any]) -> list[Any]:
        gradients.check_reducescatter(op, call)

        def gather(scaled: list[Any]) -> Sequence[Any]:
            return allgather(
                scaled, name=_of_gradient(name), process_set=process_set, totals=totals
            )

        return gradients.of_reducescatter(op, (prescale, postscale), size, grads, gather)

    def rows_here(rows: int) -> int:
        return rows // size + ((process_set.rank() or 0) < rows % size)

    compressed = [compression.compress(value_of(tensor)) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    totals = [wire.shape[0] for wire in wires if wire.ndim] if is_traced_by_jax(wires) else []
    found = _call(call, work, wires, [_with_rows(wire, rows_here) for wire in wires], of_inputs)
    return [
        compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(found, compressed, strict=True)
    ]


def _call(
    call: str,
    work: Work,
    tensors: Sequence[Any],
    shapes: Sequence[Shape] | None,
    of_inputs: Gradients,
) -> list[Any]:
    """Returns the results of work(), with these gradients for TensorFlow and for traced JAX code.
    torch has its own gradients."""
    found = [value_of(tensor) for tensor in tensors]
    if is_of_tensorflow(found):
        return _with_gradients_of_tensorflow(call, work, found, shapes, of_inputs)
    if is_traced_by_jax(found):
        return _with_gradients_of_jax(call, work, found, shapes, of_inputs)
    return on_host(work, found, shapes, call=call)


def _with_gradients_of_tensorflow(
    title: str,
    work: Work,
    tensors: Sequence[Any],
    shapes: Sequence[Shape] | None,
    of_inputs: Gradients,
) -> list[Any]:
    @sys.modules["tensorflow"].custom_gradient
    def call(*given: Any) -> Any:
        results = tuple(on_host(work, given, shapes, call=title))
        return results, lambda *grads: of_inputs(list(grads), given, results)

    return list(call(*tensors))


def _with_gradients_of_jax(
    title: str,
    work: Work,
    tensors: Sequence[Any],
    shapes: Sequence[Shape] | None,
    of_inputs: Gradients,
) -> list[Any]:
    def forward(*given: Any) -> tuple[Any, Any]:
        results = call(*given)  # this call, not its work: the second derivative goes through it
        return results, (given, results)

    call = sys.modules["jax"].custom_vjp(
        lambda *given: tuple(on_host(work, given, shapes, call=title))
    )
    call.defvjp(forward, lambda known, grads: tuple(of_inputs(list(grads), *known)))
    return list(call(*tensors))


def _reduce_over(process_set: ProcessSet, name: str | None) -> gradients.Reduce:
    """Returns the reductions of a gradient."""

    def reduce(tensors: list[Any], op: int, before: float, after: float) -> list[Any]:
        return allreduce(
            tensors,
            op,
            name=_of_gradient(name),
            prescale=before,
            postscale=after,
            process_set=process_set,
        )

    return reduce


def _with_rows(tensor: Any, rows_of: Callable[[int], int | None]) -> Shape:
    """Returns the shape with rows_of(rows) rows; a tensor of TensorFlow may have another number of
    rows on each rank."""
    if is_of_tensorflow([tensor]):
        return sys.modules["tensorflow"].TensorShape([None]).concatenate(tensor.shape[1:])
    return (rows_of(tensor.shape[0]), *tensor.shape[1:]) if tensor.ndim else ()


def _title(kind: str, name: str | None) -> str:
    """Returns the call's name in errors: "allreduce 'loss'"."""
    return kind if name is None else f"{kind} {name!r}"


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"
