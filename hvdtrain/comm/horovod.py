"""The horovod engine: Horovod through horovod.torch, on torch tensors and on numpy arrays, which are viewed as tensors."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any, NoReturn

from hvdtrain.comm.communicator import Buffer, Communicator, Handle, Op, check_buffer, writable
from hvdtrain.comm.features import Feature
from hvdtrain.comm.placement import NO_LAUNCHER, EngineLibrary, Placement, check_library, check_size, library_name
from hvdtrain.comm.side_channel.mpi import MpiSideChannel
from hvdtrain.config.schema import CommConfig
from hvdtrain.core.exit import exit_now, flush_output
from hvdtrain.errors import UserError

FEATURES: set[Feature] = {"several_ranks", "device_memory", "asynchronous", "adasum", "horovod_api"}
_BUILD_COMMAND = "python -m hvdtrain.cli.horovod"
CPU_FUSION_MB = 4.0  # default without NCCL: 100 MB in host memory take a sixth of the time that they take with Horovod's default of 128 MiB
_FIX = f"{_BUILD_COMMAND} builds Horovod for the MPI of this machine; or comm.engine=mpi"


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Starts Horovod. Without a launcher this process is rank 0 of 1.

    Raises UserError where Horovod is missing, LauncherMismatch where its MPI does not see the launcher's processes.
    """
    torch, hvd = load()
    linked = EngineLibrary("horovod", f"Horovod uses {library()}", _FIX)
    check_library(place, linked)
    _set_environment(comm or CommConfig())
    hvd.init()
    if not hvd.mpi_enabled():
        linked = linked._replace(description="Horovod uses Gloo, not MPI")
    check_size(place, linked, hvd.size())
    return HorovodCommunicator(torch, hvd, place)


def _set_environment(comm: CommConfig) -> None:
    """Horovod reads its settings from the environment, once, when it starts. Variables that the user has set are kept."""
    fusion_mb = CPU_FUSION_MB if comm.fusion_mb is None and not has_nccl() else comm.fusion_mb
    settings = {
        "HOROVOD_CYCLE_TIME": comm.cycle_ms,
        "HOROVOD_FUSION_THRESHOLD": None if fusion_mb is None else int(fusion_mb * 2**20),
        "HOROVOD_HIERARCHICAL_ALLREDUCE": 1 if comm.hierarchical else None,
        "HOROVOD_AUTOTUNE": 1 if comm.tune else None,
    }
    for name, value in settings.items():
        if value is not None:
            os.environ.setdefault(name, str(value))


def has_nccl() -> bool:
    """Whether this Horovod was built to reduce on GPUs by NCCL."""
    return bool(load()[1].nccl_built())


def load() -> tuple[Any, Any]:
    """The modules (torch, horovod.torch). Raises UserError where one cannot be imported."""
    try:
        return importlib.import_module("torch"), importlib.import_module("horovod.torch")
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"the horovod engine cannot load Horovod: {reason}", "comm.engine=horovod", _BUILD_COMMAND) from error


def library() -> str:
    """The MPI that Horovod is linked to, which needs not be started; "Gloo, built without MPI" where there is none."""
    mpi = ctypes.CDLL(importlib.import_module("horovod.torch.mpi_lib_v2").__file__)
    if not hasattr(mpi, "MPI_Get_library_version"):
        return "Gloo, built without MPI"
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()  # MPI_MAX_LIBRARY_VERSION_STRING is 8192 in MPICH, 256 in Open MPI
    mpi.MPI_Get_library_version(text, ctypes.byref(length))
    return library_name(text.value.decode())


class HorovodCommunicator:
    """Works in place on the memory of x where it can. int8, int16 and uint8, which Horovod does not reduce, go through int32."""

    name = "horovod"

    def __init__(self, torch: Any, hvd: Any, place: Placement) -> None:
        self._torch, self._hvd = torch, hvd
        self._side_channel: MpiSideChannel | None = None
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "adasum": hvd.Adasum}
        self._not_reduced = (torch.int8, torch.int16, torch.uint8)
        self.rank, self.size = hvd.rank(), hvd.size()
        nccl: set[Feature] = {"nccl"} if has_nccl() else set()
        self.features = frozenset(FEATURES | nccl)
        self.local_rank, self.local_size = place.local_rank, place.local_size
        if place.launcher == NO_LAUNCHER.launcher:
            self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self.start_allreduce(x, name, op).wait()

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        x, tensor = self._checked(x, "allreduce", name)
        operand = self._reducible(tensor)
        return PendingAllreduce(self._hvd, self._hvd.allreduce_async_(operand, name=name, op=self._ops[op]), x, tensor, operand)

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        x, tensor = self._checked(x, "broadcast", name)
        self._hvd.broadcast_(self._movable(tensor), root, name=name)
        return x

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        x, tensor = self._checked(x, "reduce_scatter", name)
        part = self._hvd.reducescatter(self._reducible(tensor), name=name, op=self._hvd.Sum)
        return _like(x, part.to(tensor.dtype))

    def allgather(self, x: Buffer, name: str) -> Buffer:
        x, tensor = self._checked(x, "allgather", name)
        return _like(x, self._hvd.allgather(self._movable(tensor), name=name).view(tensor.dtype))

    def allgather_object(self, thing: Any) -> list[Any]:
        return self._hvd.allgather_object(thing, name="exchange")

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        """Over MPI, where Horovod runs on it and mpi4py is installed for the same MPI."""
        if self._side_channel is None and self._hvd.mpi_enabled() and (mpi := _mpi4py()):
            self._side_channel = MpiSideChannel(mpi)
        return self._side_channel.gather(message, wait_s) if self._side_channel else None

    def abort(self, code: int) -> NoReturn:
        """By MPI_Abort where Horovod runs on MPI; else by exiting: horovodrun then ends the other ranks."""
        flush_output()
        if self._hvd.mpi_enabled():
            _abort_mpi(code)
        exit_now(code)

    def close(self) -> None:
        """Nothing: Horovod shuts down at exit, and cannot start again after a shutdown."""

    def _checked(self, x: Buffer, collective: str, name: str) -> tuple[Buffer, Any]:
        """x, or a copy where it is read-only; and a view of it as a tensor."""
        check_buffer(self, x, collective, name)
        x = writable(x)
        return x, x.detach() if hasattr(x, "detach") else self._torch.from_numpy(x)

    def _reducible(self, tensor: Any) -> Any:
        """The tensor, as int32 where Horovod does not reduce its type."""
        return tensor.to(self._torch.int32) if tensor.dtype in self._not_reduced else tensor

    def _movable(self, tensor: Any) -> Any:
        """A view of the tensor: Horovod does not move bool, so its bytes are moved as uint8."""
        return tensor.view(self._torch.uint8) if tensor.dtype == self._torch.bool else tensor


class PendingAllreduce:
    """A Handle."""

    def __init__(self, hvd: Any, handle: int, x: Buffer, tensor: Any, operand: Any) -> None:
        """`tensor`: a view of x, which takes the sum; `operand`: what Horovod reduces, the same or a copy of another type."""
        self._hvd, self._handle = hvd, handle
        self._x, self._tensor, self._operand = x, tensor, operand

    def wait(self) -> Buffer:
        self._hvd.synchronize(self._handle)
        if self._operand is not self._tensor:
            self._tensor.copy_(self._operand)
        return self._x


def _like(x: Buffer, tensor: Any) -> Buffer:
    """The tensor, as an array where x is one."""
    return tensor if hasattr(x, "detach") else tensor.numpy()


def _abort_mpi(code: int) -> None:
    """MPI_Abort of all ranks, where mpi4py is installed for the MPI that Horovod started."""
    mpi = _mpi4py()
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)


def _mpi4py() -> Any:
    """The module mpi4py.MPI, which neither starts nor finalizes MPI; None where it cannot be loaded."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI
