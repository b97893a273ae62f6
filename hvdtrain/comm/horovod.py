"""The horovod engine: Horovod through horovod.torch, on torch tensors and on numpy arrays, which
are viewed as tensors."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import numpy as np

from hvdtrain.comm.communicator import (
    Buffer,
    Communicator,
    Handle,
    Op,
    StartedCollectives,
    check_buffer,
    part_of,
    writable,
)
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.launcher_variables import (
    NO_LAUNCHER,
    EngineLibrary,
    Placement,
    check_library,
    check_size,
    library_name,
)
from hvdtrain.comm.mesh import split_groups
from hvdtrain.comm.rendezvous import secret_of
from hvdtrain.comm.side_channel import MpiSideChannel
from hvdtrain.comm.signed import pack, unpack
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.core.process import exit_now, flush_output
from hvdtrain.errors import UserError

FEATURES: set[Feature] = {"several_ranks", "device_memory", "asynchronous", "adasum", "horovod_api"}
# Horovod can add process sets after its start only if this variable is set
GROUPS = "HOROVOD_DYNAMIC_PROCESS_SETS"
# constant of Linux's prctl()
_PR_SET_TIMERSLACK = 29
_PR_GET_TIMERSLACK = 30
_BUILD_COMMAND = "python -m hvdtrain.cli.horovod"
# default without NCCL: 100 MB in host memory take a sixth of the time with Horovod's default of 128
# MiB
CPU_FUSION_MB = 4.0
# default if the ranks of one host reduce in host memory. Each reduction waits for a cycle: with
# Horovod's default of 1 ms, a small network's step takes up to 2.5 times as long as with plain MPI
# (benchmarks/engines.py). Between hosts a cycle exchanges messages, and Horovod's default is kept
HOST_CYCLE_MS = 0.1
# elements of one collective, which Horovod and MPI count with C's int; more are split
MOST_COUNT = 2**31 - 1
_FIX = "hvdtrain launch -np 2 -- ..., which finds an mpirun"
_OTHER_LIBRARY = f"{_BUILD_COMMAND}, with the mpicc of the launcher's MPI first on the PATH"


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Starts Horovod. Without a launcher this process is rank 0 of 1.

    Raises UserError if Horovod is missing, LauncherMismatch if its MPI does not see the launcher's
    processes.
    """
    torch, hvd = load()
    linked = EngineLibrary("horovod", f"Horovod uses {library()}", _FIX, _OTHER_LIBRARY)
    check_library(place, linked)
    one_host = place.local_size == place.size
    for name, value in horovod_variables(comm or CommConfig(), one_host, has_nccl()).items():
        os.environ.setdefault(name, value)  # the user's values are kept
    with _precise_sleep():
        hvd.init()
    if not hvd.mpi_enabled():
        linked = linked._replace(description="Horovod uses Gloo, not MPI")
    check_size(place, linked, hvd.size())
    return HorovodCommunicator(torch, hvd, place)


def note_on_speed(communicator: Communicator) -> str:
    """Returns a header line if mpi can be faster: among the ranks of one host, in host memory.
    Measured with benchmarks/engines.py on two ranks; large models take the same time with both."""
    one_host = 1 < communicator.size == communicator.local_size
    if (
        not one_host
        or "nccl" in communicator.features
        or importlib.util.find_spec("mpi4py") is None
    ):
        return ""
    return "comm.engine=mpi is faster for small models (0.8 of the step time)"


def horovod_variables(comm: CommConfig, one_host: bool, nccl: bool) -> dict[str, str]:
    """Returns the variables that Horovod reads once, when it starts. one_host: all ranks run on one
    host; nccl: Horovod reduces on GPUs by NCCL."""
    fusion_mb = comm.fusion_mb
    cycle_ms = comm.cycle_ms
    if not nccl and fusion_mb is None:
        fusion_mb = CPU_FUSION_MB
    if not nccl and one_host and cycle_ms is None:
        cycle_ms = HOST_CYCLE_MS
    settings = {
        "HOROVOD_CYCLE_TIME": cycle_ms,
        "HOROVOD_FUSION_THRESHOLD": None if fusion_mb is None else int(fusion_mb * 2**20),
        "HOROVOD_HIERARCHICAL_ALLREDUCE": 1 if comm.hierarchical else None,
        "HOROVOD_AUTOTUNE": 1 if comm.tune else None,
    }
    return {name: str(value) for name, value in settings.items() if value is not None}


@contextlib.contextmanager
def _precise_sleep() -> Iterator[None]:
    """Threads that start within sleep to the microsecond. Linux otherwise lets a sleep end 50 us
    late, half a cycle of Horovod's thread."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    former_ns = libc.prctl(_PR_GET_TIMERSLACK)
    libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1000))
    try:
        yield
    finally:
        libc.prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(max(former_ns, 1)))


def has_nccl() -> bool:
    """Whether this Horovod was built to reduce on GPUs by NCCL."""
    return bool(load()[1].nccl_built())


def load() -> tuple[Any, Any]:
    """Returns the modules (torch, horovod.torch). Raises UserError if one cannot be imported."""
    try:
        return importlib.import_module("torch"), importlib.import_module("horovod.torch")
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"the horovod engine cannot load Horovod: {reason}",
            "comm.engine=horovod",
            _BUILD_COMMAND,
        ) from error


def library() -> str:
    """Returns the MPI that Horovod is linked to, without starting it; "Gloo, built without MPI" if
    there is none."""
    mpi = ctypes.CDLL(importlib.import_module("horovod.torch.mpi_lib_v2").__file__)
    if not hasattr(mpi, "MPI_Get_library_version"):
        return "Gloo, built without MPI"
    # MPI_MAX_LIBRARY_VERSION_STRING is 8192 in MPICH, 256 in Open MPI
    text = ctypes.create_string_buffer(8192)
    length = ctypes.c_int()
    mpi.MPI_Get_library_version(text, ctypes.byref(length))
    return library_name(text.value.decode())


class HorovodCommunicator(StartedCollectives):
    """A communicator on Horovod. Works in place on the memory of x if possible. int8, int16 and
    uint8, which Horovod does not reduce, are converted to int32."""

    name = "horovod"

    def __init__(
        self,
        torch: Any,
        hvd: Any,
        place: Placement,
        process_sets: ProcessSets | None = None,
        process_set: Any = None,
    ) -> None:
        """process_set: the Horovod process set to use, with `place` as this rank's placement in it;
        default: all ranks."""
        self._torch = torch
        self._hvd = hvd
        self._sets = process_sets or ProcessSets(hvd)
        self._set = process_set or hvd.global_process_set
        self._is_group = process_set is not None
        self._side_channel: MpiSideChannel | None = None
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "adasum": hvd.Adasum}
        self._not_reduced = (torch.int8, torch.int16, torch.uint8)
        self.secret = None if hvd.mpi_enabled() else secret_of(os.environ)
        self.rank = self._set.rank()
        self.size = self._set.size()
        nccl: set[Feature] = {"nccl"} if has_nccl() else set()
        self.features = frozenset(FEATURES | nccl)
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        if place.launcher == NO_LAUNCHER.launcher:
            self.local_rank = hvd.local_rank()
            self.local_size = hvd.local_size()

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        x, tensor = self._checked(x, "allreduce", name)
        operand = self._reducible(tensor)
        if (
            op == "adasum" and operand.numel() > MOST_COUNT
        ):  # it scales a whole buffer by its norm, and pieces would have different scales
            where = f"comm.engine=horovod, allreduce {name!r}"
            raise UserError(
                f"Adasum of {operand.numel():,} numbers, at most {MOST_COUNT:,}",
                where,
                "a smaller comm.bucket_mb",
            )
        return PendingInPlace(
            self._hvd, self._sum(operand, name, self._ops[op]), x, tensor, operand
        )

    def _sum(self, operand: Any, name: str, op: Any) -> list[Any]:
        pieces = _pieces(operand, name)
        return [
            self._hvd.allreduce_async_(piece, name=part, op=op, process_set=self._set)
            for part, piece in pieces
        ]

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        x, tensor = self._checked(x, "broadcast", name)
        bits = self._movable(tensor)
        return PendingInPlace(self._hvd, self._copy(bits, name, root), x, bits, bits)

    def _copy(self, bits: Any, name: str, root: int) -> list[Any]:
        root = self._set.ranks[root]
        return [
            self._hvd.broadcast_async_(piece, root, name=part, process_set=self._set)
            for part, piece in _pieces(bits, name)
        ]

    def _copy_parts(self, bits: Any, name: str, ends: Sequence[int]) -> list[Any]:
        """Copies the rows of each rank to all ranks. Replaces an allgather with more elements than
        one collective can count."""
        parts = zip([0, *ends], ends, strict=False)
        owners = [(owner, begin, end) for owner, (begin, end) in enumerate(parts) if begin < end]
        return [
            handle
            for owner, begin, end in owners
            for handle in self._copy(bits[begin:end], f"{name}.of{owner}", owner)
        ]

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        """Starts an allreduce: Horovod has no reduction to one rank."""
        return self.start_allreduce(x, name)

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        x, tensor = self._checked(x, "reduce_scatter", name)
        operand = self._reducible(tensor)
        own = part_of(len(tensor), self.rank, self.size)
        if operand.numel() > MOST_COUNT:
            total = operand.clone()
            return _like(
                x,
                PendingInPlace(
                    self._hvd, self._sum(total, name, self._hvd.Sum), total, total, total
                )
                .wait()[own]
                .to(tensor.dtype),
            )
        part = self._hvd.reducescatter(operand, name=name, op=self._hvd.Sum, process_set=self._set)
        return _like(x, part.to(tensor.dtype))

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        x, tensor = self._checked(x, "start_reduce_scatter", name)
        operand = self._reducible(tensor)
        own = part_of(len(tensor), self.rank, self.size)
        if operand.numel() > MOST_COUNT:
            total = operand.clone()
            return PendingInPlace(
                self._hvd, self._sum(total, name, self._hvd.Sum), x[own], tensor[own], total[own]
            )
        handle = self._hvd.reducescatter_async(
            operand, name=name, op=self._hvd.Sum, process_set=self._set
        )
        return PendingPart(self._hvd, handle, x[own], tensor[own])

    def start_spread(self, x: Buffer, name: str) -> Handle:
        x, tensor = self._checked(x, "allgather", name)
        bits = self._movable(tensor)
        if bits.numel() > MOST_COUNT:
            ends = [part_of(len(tensor), rank, self.size).stop for rank in range(self.size)]
            return PendingInPlace(self._hvd, self._copy_parts(bits, name, ends), x, bits, bits)
        own = bits[part_of(len(tensor), self.rank, self.size)]
        return PendingPart(
            self._hvd, self._hvd.allgather_async(own, name=name, process_set=self._set), x, bits
        )

    def allgather(self, x: Buffer, name: str) -> Buffer:
        x, tensor = self._checked(x, "allgather", name)
        bits = self._movable(tensor)
        rows = self._hvd.allgather(
            self._torch.tensor([len(bits)]), name=f"{name}.rows", process_set=self._set
        )
        ends = [int(end) for end in rows.cumsum(0)]
        if ends[-1] * math.prod(bits.shape[1:]) <= MOST_COUNT:
            return _like(
                x, self._hvd.allgather(bits, name=name, process_set=self._set).view(tensor.dtype)
            )
        whole = bits.new_empty((ends[-1], *bits.shape[1:]))
        whole[ends[self.rank] - len(bits) : ends[self.rank]] = bits
        PendingInPlace(self._hvd, self._copy_parts(whole, name, ends), whole, whole, whole).wait()
        return _like(x, whole.view(tensor.dtype))

    def allgather_object(self, thing: Any) -> list[Any]:
        if not self._is_group:
            return self._hvd.allgather_object(thing, name="exchange")
        packed = np.frombuffer(pack(thing, ""), np.uint8)
        lengths = self.allgather(np.array([len(packed)]), "exchange.lengths")
        parts = np.split(self.allgather(packed, "exchange"), np.cumsum(lengths)[:-1])
        return [unpack(part.tobytes(), "") for part in parts]

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        if not self._is_group:
            return self._hvd.broadcast_object(thing, root, name="exchange.of_one")
        packed = (
            np.frombuffer(pack(thing, ""), np.uint8) if self.rank == root else np.zeros(0, np.uint8)
        )
        length = self.broadcast(np.array([len(packed)]), "exchange.length", root)
        content = packed.copy() if self.rank == root else np.zeros(int(length[0]), np.uint8)
        return unpack(self.broadcast(content, "exchange.of_one", root).tobytes(), "")

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Works over MPI, if Horovod runs on MPI and mpi4py is installed for the same MPI."""
        if (
            self._side_channel is None
            and not self._is_group
            and self._hvd.mpi_enabled()
            and (mpi := _mpi4py())
        ):
            self._side_channel = MpiSideChannel(mpi, mpi.COMM_WORLD)
        return self._side_channel.gather(message, wait_s) if self._side_channel else None

    def split(self, color: int | None) -> Communicator | None:
        """Returns a process set. Horovod must have been started with dynamic process sets:
        connect() does that if shard.group needs groups."""
        assert not self._is_group, "of all ranks alone"
        groups = split_groups(self, color)
        own = None
        for members in groups.members:  # every rank adds all of them
            process_set = self._sets.process_set_of(members)
            if self.rank in members:
                own = HorovodCommunicator(
                    self._torch, self._hvd, groups.place(self.rank), self._sets, process_set
                )
        return own

    def abort(self, code: int) -> NoReturn:
        """Calls MPI_Abort if Horovod runs on MPI. Otherwise it exits, and horovodrun ends the other
        ranks."""
        flush_output()
        if self._hvd.mpi_enabled():
            _abort_mpi(code)
        exit_now(code)

    def close(self) -> None:
        """Does nothing: Horovod shuts down at exit, and cannot start again after a shutdown."""

    def _checked(self, x: Buffer, collective: str, name: str) -> tuple[Buffer, Any]:
        """Returns x, or a copy if it is read-only, and a view of it as a tensor."""
        check_buffer(self, x, collective, name)
        x = writable(x)
        return x, x.detach() if hasattr(x, "detach") else self._torch.from_numpy(x)

    def _reducible(self, tensor: Any) -> Any:
        """Returns the tensor, as int32 if Horovod does not reduce its dtype."""
        return tensor.to(self._torch.int32) if tensor.dtype in self._not_reduced else tensor

    def _movable(self, tensor: Any) -> Any:
        """Returns a view of the tensor, with bool as uint8, because Horovod does not move bool."""
        return tensor.view(self._torch.uint8) if tensor.dtype == self._torch.bool else tensor


class ProcessSets:
    """Horovod's process sets by their ranks; Horovod rejects two sets with the same ranks."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd
        self._known = {tuple(hvd.global_process_set.ranks): hvd.global_process_set}

    def process_set_of(self, ranks: Sequence[int]) -> Any:
        """Returns the process set of these ranks. Every rank of the job calls it. Raises UserError
        if Horovod was started without process sets."""
        key = tuple(ranks)
        if key not in self._known:
            if os.environ.get(GROUPS) != "1":
                raise UserError(
                    "Horovod was started without groups of ranks",
                    "comm.engine=horovod",
                    f"{GROUPS}=1, or comm.engine=mpi",
                )
            self._known[key] = self._hvd.add_process_set(list(ranks))
        return self._known[key]


class PendingInPlace:
    """A Handle."""

    def __init__(
        self, hvd: Any, handles: Sequence[Any], x: Buffer, tensor: Any, operand: Any
    ) -> None:
        """`tensor`: a view of x, which receives the result; `operand`: the tensor that Horovod
        changes, the same or a copy of another dtype."""
        self._hvd = hvd
        self._handles = handles
        self._x = x
        self._tensor = tensor
        self._operand = operand

    def wait(self) -> Buffer:
        for handle in self._handles:
            self._hvd.synchronize(handle)
        if self._operand is not self._tensor:
            self._tensor.copy_(self._operand)
        return self._x


class PendingPart:
    """A Handle of a collective whose result is a new tensor."""

    def __init__(self, hvd: Any, handle: Any, x: Buffer, tensor: Any) -> None:
        """`tensor`: a view of x, which receives the result."""
        self._hvd = hvd
        self._handle = handle
        self._x = x
        self._tensor = tensor

    def wait(self) -> Buffer:
        self._tensor.copy_(self._hvd.synchronize(self._handle))
        return self._x


def _pieces(tensor: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the tensor, or views of at most MOST_COUNT elements, each with a separate name."""
    if tensor.numel() <= MOST_COUNT:
        return iter([(name, tensor)])
    return (
        (f"{name}.{number}", piece)
        for number, piece in enumerate(tensor.view(-1).split(MOST_COUNT))
    )


def _like(x: Buffer, tensor: Any) -> Buffer:
    """Returns the tensor, as an array if x is one."""
    return tensor if hasattr(x, "detach") else tensor.numpy()


def _abort_mpi(code: int) -> None:
    """Aborts all ranks with MPI_Abort, if mpi4py is installed for the MPI that Horovod started."""
    mpi = _mpi4py()
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)


def _mpi4py() -> Any:
    """Returns the module mpi4py.MPI, without starting or finalizing MPI; None if it cannot be
    loaded."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI
