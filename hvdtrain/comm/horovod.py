"""The horovod engine: Horovod through horovod.torch, on torch tensors and on numpy arrays, seen as tensors."""

from __future__ import annotations

import ctypes
import importlib
import os
from typing import Any, NoReturn

from hvdtrain.comm.communicator import Buffer, Communicator, Handle, Op, check_buffer, writable
from hvdtrain.comm.features import Feature
from hvdtrain.comm.placement import NO_LAUNCHER, Binding, Placement, check_library, check_size, library_name
from hvdtrain.comm.side_channel.mpi import MpiSideChannel
from hvdtrain.config.schema import CommConfig
from hvdtrain.core.exit import exit_now, flush_output
from hvdtrain.errors import UserError

FEATURES: set[Feature] = {"several_ranks", "device_memory", "asynchronous", "adasum", "horovod_api"}
_BUILD = "python -m hvdtrain.cli.horovod"
CPU_FUSION_MB = 4.0  # in host memory 100 MB take a sixth of the time that Horovod's own 128 MiB need: they stay in the cache
_FIX = f"{_BUILD} builds Horovod for the MPI that is here; or comm.engine=mpi"


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Starts Horovod. Without a launcher this process is its rank 0 of 1."""
    torch, hvd = load()
    binding = Binding("horovod", f"Horovod uses {library()}", _FIX)
    check_library(place, binding)
    _set_knobs(comm or CommConfig())
    hvd.init()
    if not hvd.mpi_enabled():
        binding = binding._replace(library="Horovod uses Gloo, not MPI")
    check_size(place, binding, hvd.size())
    return HorovodCommunicator(torch, hvd, place)


def _set_knobs(comm: CommConfig) -> None:
    """Horovod reads its settings once, from the environment, when it starts; what the user has set there wins."""
    fusion_mb = CPU_FUSION_MB if comm.fusion_mb is None and not has_nccl() else comm.fusion_mb
    knobs = {
        "HOROVOD_CYCLE_TIME": comm.cycle_ms,
        "HOROVOD_FUSION_THRESHOLD": None if fusion_mb is None else int(fusion_mb * 2**20),
        "HOROVOD_HIERARCHICAL_ALLREDUCE": 1 if comm.hierarchical else None,
        "HOROVOD_AUTOTUNE": 1 if comm.tune else None,
    }
    for name, value in knobs.items():
        if value is not None:
            os.environ.setdefault(name, str(value))


def has_nccl() -> bool:
    """Whether this Horovod was built to reduce on GPUs by NCCL."""
    return bool(load()[1].nccl_built())


def load() -> tuple[Any, Any]:
    try:
        return importlib.import_module("torch"), importlib.import_module("horovod.torch")
    except ImportError as error:
        why = str(error).splitlines()[0]
        raise UserError(f"the horovod engine cannot load Horovod: {why}", "comm.engine=horovod", _BUILD) from error


def library() -> str:
    """The MPI that Horovod was linked against, by its own words, asked before it starts."""
    mpi = ctypes.CDLL(importlib.import_module("horovod.torch.mpi_lib_v2").__file__)
    if not hasattr(mpi, "MPI_Get_library_version"):
        return "Gloo, built without MPI"
    text, length = ctypes.create_string_buffer(8192), ctypes.c_int()  # MPI_MAX_LIBRARY_VERSION_STRING is 8192 in MPICH, 256 in Open MPI
    mpi.MPI_Get_library_version(text, ctypes.byref(length))
    return library_name(text.value.decode())


class HorovodCommunicator:
    """Works in place on x's memory where it can. int8, int16, uint8, which Horovod does not reduce, go through int32 and are cast back."""

    name = "horovod"

    def __init__(self, torch: Any, hvd: Any, place: Placement) -> None:
        self._torch, self._hvd = torch, hvd
        self._muster: MpiSideChannel | None = None
        self._ops = {"sum": hvd.Sum, "min": hvd.Min, "max": hvd.Max, "adasum": hvd.Adasum}
        self._narrow = (torch.int8, torch.int16, torch.uint8)
        self.rank, self.size = hvd.rank(), hvd.size()
        nccl: set[Feature] = {"nccl"} if has_nccl() else set()
        self.features = frozenset(FEATURES | nccl)
        self.local_rank, self.local_size = place.local_rank, place.local_size
        if place.launcher == NO_LAUNCHER.launcher:
            self.local_rank, self.local_size = hvd.local_rank(), hvd.local_size()

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self.start_allreduce(x, name, op).wait()

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        x, tensor = self._accepted(x, "allreduce", name)
        wide = self._widen(tensor)
        return Reduction(self._hvd, self._hvd.allreduce_async_(wide, name=name, op=self._ops[op]), (x, tensor, wide))

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        x, tensor = self._accepted(x, "broadcast", name)
        self._hvd.broadcast_(self._bits(tensor), root, name=name)
        return x

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        x, tensor = self._accepted(x, "reduce_scatter", name)
        part = self._hvd.reducescatter(self._widen(tensor), name=name, op=self._hvd.Sum)
        return _like(x, part.to(tensor.dtype))

    def allgather(self, x: Buffer, name: str) -> Buffer:
        x, tensor = self._accepted(x, "allgather", name)
        return _like(x, self._hvd.allgather(self._bits(tensor), name=name).view(tensor.dtype))

    def allgather_object(self, thing: Any) -> list[Any]:
        return self._hvd.allgather_object(thing, name="exchange")

    def side_channel_gather(self, text: str, wait_s: float) -> list[str | None] | None:
        """Through MPI where Horovod runs on it, and mpi4py is here and uses the same."""
        if self._muster is None and self._hvd.mpi_enabled() and (mpi := _mpi4py()):
            self._muster = MpiSideChannel(mpi)
        return self._muster.gather(text, wait_s) if self._muster else None

    def abort(self, code: int) -> NoReturn:
        """Through MPI where Horovod runs on it; under horovodrun the launcher sees this process end, and ends the others."""
        flush_output()
        if self._hvd.mpi_enabled():
            _abort_mpi(code)
        exit_now(code)

    def close(self) -> None:
        """Nothing: Horovod shuts down at exit, and cannot start again after a shutdown."""

    def _accepted(self, x: Buffer, collective: str, name: str) -> tuple[Buffer, Any]:
        """x, or a copy if it is read-only, and its memory as a tensor."""
        check_buffer(self, x, collective, name)
        x = writable(x)
        return x, x.detach() if hasattr(x, "detach") else self._torch.from_numpy(x)

    def _widen(self, tensor: Any) -> Any:
        return tensor.to(self._torch.int32) if tensor.dtype in self._narrow else tensor

    def _bits(self, tensor: Any) -> Any:
        """Horovod does not move bool: its bytes go as uint8."""
        return tensor.view(self._torch.uint8) if tensor.dtype == self._torch.bool else tensor


class Reduction:
    """An allreduce under way."""

    def __init__(self, hvd: Any, handle: int, buffers: tuple[Buffer, Any, Any]) -> None:
        self._hvd, self._handle, self._buffers = hvd, handle, buffers

    def wait(self) -> Buffer:
        self._hvd.synchronize(self._handle)
        x, tensor, wide = self._buffers
        if wide is not tensor:
            tensor.copy_(wide)
        return x


def _like(x: Buffer, tensor: Any) -> Buffer:
    return tensor if hasattr(x, "detach") else tensor.numpy()


def _abort_mpi(code: int) -> None:
    """COMM_WORLD.Abort, if mpi4py is here and uses the MPI that Horovod started."""
    mpi = _mpi4py()
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)


def _mpi4py() -> Any:
    """mpi4py.MPI, which neither starts nor ends MPI; None where it cannot be loaded."""
    try:
        import mpi4py

        mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return MPI
