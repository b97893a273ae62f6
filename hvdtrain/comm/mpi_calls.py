"""MPI calls for arrays and tensors, converted to number types, pieces and counts that MPI
supports."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Buffer, Op, part_of, writable
from hvdtrain.comm.device_memory import DeviceArray

PIECE_BYTES = (
    4 << 20
)  # of one message or MPI_Allreduce: 100 MB in pieces take a quarter of the time of one call (docs/performance.md)  # noqa: E501
# MPI_Reduce_scatter of at most these for each rank is the faster way (docs/performance.md)
ONE_CALL_BYTES = 1 << 16
# most elements in one call, because MPI counts with C's int; larger buffers are sent in pieces
MOST_COUNT = 2**31 - 1
HALF_TYPES = ("float16", "bfloat16")
_HALF_SUMS: dict[str, Any] = {}  # dtype -> MPI operation, mpi4py allows 32 in a process

Sent = Any  # an array of numpy, or a DeviceArray, which behaves like an array here


class Reduction(NamedTuple):
    """A pending allreduce."""

    x: Buffer  # the caller's buffer, or a copy if it is read-only
    array: Sent  # a view of x
    operand: Sent  # the view, or a copy in a type that MPI has
    op: Any  # the MPI operation


class MpiCalls:
    """Collectives and messages between the ranks of an MPI communicator. Collectives are done when
    they return, and work in place if they can.

    Sums of float16 and bfloat16, which MPI does not have, are computed by torch. Other reductions
    of float16 (min, max, reduce_scatter) go through float32 and are cast back.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi = mpi
        self._comm = comm
        self._rank = comm.rank
        self._size = comm.size
        self._ops = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}

    def allreduce(self, x: Buffer, op: Op) -> Buffer:
        reduction = self._reduction(x, op)
        for piece in _pieces(reduction.operand.reshape(-1)):
            self._comm.Allreduce(self._mpi.IN_PLACE, self._message(piece), reduction.op)
        return _cast_back(reduction.x, reduction.array, reduction.operand)

    def reduce(self, x: Buffer, root: int) -> Buffer:
        """Returns the sum on rank `root`."""
        reduction = self._reduction(x, "sum")
        self._reduce_pieces(reduction.operand.reshape(-1), reduction.op, root)
        return _cast_back(reduction.x, reduction.array, reduction.operand)

    def reduce_to_owners(self, x: Buffer) -> Buffer:
        """Returns this rank's part of the sum. Large parts are reduced to one rank after another,
        in pieces, because a single call takes up to 6 times as long. For small parts, one call per
        rank would be dominated by latency."""
        reduction = self._reduction(x, "sum")
        operand = reduction.operand
        own = part_of(len(reduction.operand), self._rank, self._size)
        if operand.nbytes <= ONE_CALL_BYTES * self._size and operand.size <= MOST_COUNT:
            self._comm.Reduce_scatter(
                self._mpi.IN_PLACE,
                self._message(operand.reshape(-1)),
                self._counts(operand),
                reduction.op,
            )
            own = slice(own.stop - own.start)  # MPI writes this rank's part to the beginning
        else:
            for owner in range(self._size):
                part = operand[part_of(len(operand), owner, self._size)]
                self._reduce_pieces(part.reshape(-1), reduction.op, owner)
        if operand is reduction.array:
            return reduction.x[own]
        return _cast_back(reduction.x[own], reduction.array[own], operand[own])

    def reduce_scatter(self, x: Buffer) -> Buffer:
        """Returns this rank's part of the sum in new memory; x is not changed."""
        operand = _without_float16(_as_array(x))
        parts = [operand[part_of(len(operand), rank, self._size)] for rank in range(self._size)]
        summed = _empty_like(operand, len(parts[self._rank]))
        if operand.size <= MOST_COUNT:
            self._comm.Reduce_scatter(
                self._message(operand),
                self._message(summed),
                [one.size for one in parts],
                self._mpi.SUM,
            )
        else:
            for owner, one in enumerate(parts):
                sums = (
                    _pieces(summed.reshape(-1)) if owner == self._rank else itertools.repeat(None)
                )
                for piece, into in zip(_pieces(one.reshape(-1)), sums, strict=False):
                    self._comm.Reduce(
                        self._message(piece),
                        None if into is None else self._message(into),
                        self._mpi.SUM,
                        owner,
                    )
        if isinstance(summed, DeviceArray):
            return summed
        part = _empty_like(x, len(summed))
        return _cast_back(part, _as_array(part), summed)

    def broadcast(self, x: Buffer, root: int) -> Buffer:
        self._broadcast_pieces(_as_unsigned(x).reshape(-1), root)
        return x

    def spread(self, x: Buffer) -> Buffer:
        """Copies each rank's part of x to all ranks."""
        bits = _as_unsigned(x)
        if bits.size <= MOST_COUNT:
            self._comm.Allgatherv(
                self._mpi.IN_PLACE, self._message(bits.reshape(-1), self._counts(bits))
            )
            return x
        for owner in range(self._size):
            self._broadcast_pieces(bits[part_of(len(bits), owner, self._size)].reshape(-1), owner)
        return x

    def allgather(self, x: Buffer) -> Buffer:
        bits = _as_unsigned(x)
        rows = np.empty(self._size, np.int64)
        self._comm.Allgather(np.array([len(bits)]), rows)
        gathered = _empty_like(x, int(rows.sum()))
        ends = rows.cumsum()
        into = _as_unsigned(gathered)
        per_row = math.prod(bits.shape[1:])
        if into.size <= MOST_COUNT:
            self._comm.Allgatherv(
                self._message(bits.reshape(-1)),
                self._message(into.reshape(-1), [int(n) * per_row for n in rows]),
            )
            return gathered
        into[ends[self._rank] - len(bits) : ends[self._rank]] = bits
        for owner, end in enumerate(ends):
            self._broadcast_pieces(into[end - rows[owner] : end].reshape(-1), owner)
        return gathered

    def send(self, x: Buffer, to: int, tag: int) -> PendingMessage:
        return PendingMessage(
            [self._comm.Isend(piece, to, tag) for piece in _pieces(_as_unsigned(x).reshape(-1))], x
        )

    def recv(self, x: Buffer, source: int, tag: int) -> PendingMessage:
        return PendingMessage(
            [
                self._comm.Irecv(piece, source, tag)
                for piece in _pieces(_as_unsigned(x).reshape(-1))
            ],
            x,
        )

    def recv_from_any(self, x: Buffer, tag: int) -> int:
        """Receives a message and returns its sender. Raises ValueError for more than one piece."""
        bits = _as_unsigned(x).reshape(-1)
        status = self._mpi.Status()
        if bits.nbytes > PIECE_BYTES:
            raise ValueError(
                f"{bits.nbytes} bytes from any rank: pieces of two senders would be mixed"
            )
        self._comm.Recv(bits, self._mpi.ANY_SOURCE, tag, status)
        return int(status.source)

    def _reduction(self, x: Buffer, op: Op) -> Reduction:
        x = writable(x)
        dtype = str(x.dtype).removeprefix("torch.")
        if op == "sum" and dtype in HALF_TYPES:
            if dtype not in _HALF_SUMS:
                _HALF_SUMS[dtype] = self._mpi.Op.Create(_sum_function(dtype), commute=True)
            bits = _as_unsigned(x)
            return Reduction(x, bits, bits, _HALF_SUMS[dtype])
        array = _as_array(x)
        return Reduction(x, array, _without_float16(array), self._ops[op])

    def _reduce_pieces(self, flat: Sent, op: Any, root: int) -> None:
        for piece in _pieces(flat):
            if root == self._rank:
                self._comm.Reduce(self._mpi.IN_PLACE, self._message(piece), op, root)
            else:
                self._comm.Reduce(self._message(piece), None, op, root)

    def _broadcast_pieces(self, flat: Sent, root: int) -> None:
        for piece in _pieces(flat):
            self._comm.Bcast(self._message(piece), root)

    def _counts(self, array: Sent) -> list[int]:
        """Returns elements of each rank's part."""
        return [array[part_of(len(array), rank, self._size)].size for rank in range(self._size)]

    def _message(self, array: Sent, counts: list[int] | None = None) -> Any:
        """Returns the message for mpi4py. counts: elements of each rank's part."""
        if isinstance(array, DeviceArray):
            buffer, count, kind = array.message(self._mpi)
            return [buffer, count if counts is None else counts, kind]
        return array if counts is None else [array, counts]


class PendingMessage:
    """A Handle of the pieces of one message."""

    def __init__(self, requests: list[Any], x: Buffer) -> None:
        self._requests = requests
        self._x = x

    def wait(self) -> Buffer:
        for (
            request
        ) in self._requests:  # Waitall() reports only that one has failed, not that a rank died
            request.Wait()
        return self._x


def _pieces(flat: Sent) -> Iterator[Sent]:
    """Views that stay in the cache; MPI_Iallreduce of all at once takes 3 times as long."""
    step = max(1, PIECE_BYTES // flat.itemsize)
    return (flat[start : start + step] for start in range(0, len(flat), step))


def _as_array(x: Buffer) -> Sent:
    """Returns a view of x."""
    return x.detach().numpy() if hasattr(x, "detach") else x


def _as_unsigned(x: Buffer) -> Sent:
    """Returns a view of x as unsigned integers of its itemsize, for collectives that only move
    data, because MPI has no float16 and NumPy no bfloat16."""
    if isinstance(x, DeviceArray):
        return x.as_unsigned()
    array = _as_array(x.view(sys.modules["torch"].int16) if str(x.dtype) == "torch.bfloat16" else x)
    return array.view(f"u{array.itemsize}")


def _empty_like(x: Buffer, rows: int) -> Buffer:
    """Returns uninitialized memory with x's dtype and `rows` rows."""
    shape = (rows, *x.shape[1:])
    if isinstance(x, DeviceArray):
        return x.empty(*shape)
    return x.new_empty(shape) if hasattr(x, "new_empty") else np.empty(shape, x.dtype)


def _without_float16(array: Sent) -> Sent:
    """Returns the array, as float32 if it is float16."""
    return (
        array.astype(np.float32)
        if isinstance(array, np.ndarray) and array.dtype == np.float16
        else array
    )


def _cast_back(x: Buffer, array: Sent, operand: Sent) -> Buffer:
    """Copies the numbers of `operand` to x, by its view `array`, and returns x."""
    if operand is not array:
        with np.errstate(
            over="ignore"
        ):  # an overflow becomes inf, as in float16 arithmetic; loss scaling detects it
            array[...] = operand
    return x


def _sum_function(dtype: str) -> Callable[[Any, Any, Any], None]:
    """Returns a function for MPI.Op.Create: b += a, elementwise, for buffers of `dtype` that MPI
    treats as integers. Each addition rounds."""
    import torch

    half_type = getattr(torch, dtype)

    def add(a: Any, b: Any, _: Any) -> None:
        if len(b):
            torch.frombuffer(b, dtype=half_type).add_(
                torch.frombuffer(bytearray(a) if a.readonly else a, dtype=half_type)
            )

    return add
