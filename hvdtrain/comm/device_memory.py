"""comm.device_memory: whether MPI gets the address of a tensor in GPU memory, or a copy of it in
host memory."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import library_name
from hvdtrain.errors import UserError

Wish = Literal["auto", "host", "device"]  # values of comm.device_memory
Way = Literal["host", "device"]
Driver = Literal["cuda", "rocm", "ze"]  # ze: Intel's Level Zero


class _Switch(NamedTuple):
    """The environment variable that enables GPU memory in a library; being built for it is not
    enough."""

    variables: tuple[str, ...]
    is_enough: bool  # the library exits at startup if it cannot satisfy the variable


_SWITCHES: dict[tuple[str, Driver], _Switch] = {
    ("CRAY MPICH", "cuda"): _Switch(("MPICH_GPU_SUPPORT_ENABLED",), True),
    ("CRAY MPICH", "rocm"): _Switch(("MPICH_GPU_SUPPORT_ENABLED",), True),
    ("INTEL", "ze"): _Switch(("I_MPI_OFFLOAD",), False),
    ("MVAPICH", "cuda"): _Switch(("MV2_USE_CUDA", "MVP_USE_CUDA"), False),
}
_QUERIES: dict[Driver, tuple[str, ...]] = {
    "cuda": ("MPIX_Query_cuda_support",),  # Open MPI, MPICH
    "rocm": ("MPIX_Query_rocm_support", "MPIX_Query_hip_support"),  # Open MPI; MPICH
    "ze": ("MPIX_Query_ze_support",),  # MPICH, Intel MPI
}
# MPIX_GPU_SUPPORT_CUDA, _ZE and _HIP of MPICH's mpi.h
_MPICH_TYPES: dict[Driver, int] = {
    "cuda": 0,
    "ze": 1,
    "rocm": 2,
}
_NO, _UNKNOWN, _YES = range(3)


class Answer(NamedTuple):
    """What an MPI library reports about GPU memory."""

    takes_it: bool | None  # None: not reported
    how: str  # "MPIX_Query_cuda_support() of Open MPI v5.0.11 says no"


def ask(library: ctypes.CDLL, version: str, environ: Mapping[str, str], kind: Driver) -> Answer:
    """Queries an initialized MPI library. library: the shared library with its functions; version:
    the result of MPI_Get_library_version()."""
    name = library_name(version)
    switch = next(
        (found for (start, of), found in _SWITCHES.items() if start in name.upper() and of == kind),
        None,
    )
    is_set = next(
        (
            f"{one}={environ[one]}"
            for one in (switch.variables if switch else ())
            if environ.get(one, "0") not in ("", "0")
        ),
        "",
    )
    if switch and (switch.is_enough or not is_set):
        return Answer(
            bool(is_set),
            f"{name} with {is_set}" if is_set else f"{name} without {switch.variables[-1]}=1",
        )
    for function in _QUERIES[kind]:
        if hasattr(library, function):
            takes_it = bool(getattr(library, function)())
            return Answer(takes_it, f"{function}() of {name} says {'yes' if takes_it else 'no'}")
    if hasattr(library, "MPIX_GPU_query_support"):
        found = ctypes.c_int()
        failed = library.MPIX_GPU_query_support(
            ctypes.c_int(_MPICH_TYPES[kind]), ctypes.byref(found)
        )
        takes_it = not failed and bool(found.value)
        return Answer(
            takes_it, f"MPIX_GPU_query_support() of {name} says {'yes' if takes_it else 'no'}"
        )
    if is_set:
        return Answer(True, f"{name} with {is_set}")
    return Answer(None, f"{name} does not report whether it takes GPU memory")


class DeviceMemoryChoice(NamedTuple):
    """The choice that all ranks agreed on."""

    way: Way | None  # None: no rank computes on a GPU
    note: str  # a line for the user; empty if there is nothing to report


def choose(
    communicator: Communicator, answer: Answer | None, wish: Wish, where: str
) -> DeviceMemoryChoice:
    """Chooses how collectives take tensors on GPUs. A collective. answer: from this rank's library;
    None if the rank computes on a CPU.

    Raises UserError, on every rank, if comm.device_memory=device is not possible.
    """
    if answer is None or answer.takes_it:
        code = _YES
    elif answer.takes_it is None:
        code = _UNKNOWN
    else:
        code = _NO
    least = communicator.allreduce(
        np.array([answer is not None, -(answer is not None), code]), "device memory", "min"
    )
    all_on_gpus = bool(least[0])
    any_on_gpu = bool(least[1])
    least_code = int(least[2])
    how = (
        answer.how
        if answer and code == least_code
        else f"{'the MPI of ' if least_code < _YES else ''}another rank"
    )
    if not any_on_gpu:
        return DeviceMemoryChoice(
            None,
            f"comm.device_memory={wish} does nothing: no rank computes on a GPU"
            if wish != "auto"
            else "",
        )
    if wish == "device" and (least_code == _NO or not all_on_gpus):
        what = (
            how
            if all_on_gpus
            else "a rank computes on a CPU, so that MPI would get memory of both kinds in one "
            "collective"
        )
        raise UserError(
            f"comm.device_memory=device: {what}",
            where,
            "comm.device_memory=host, or an MPI that is built for these GPUs",
        )
    if wish == "device" or (wish == "auto" and all_on_gpus and least_code == _YES):
        return DeviceMemoryChoice(
            "device",
            "GPU tensors are handed to MPI as they are: "
            f"{how if least_code == _YES else f'comm.device_memory=device; {how}'}",
        )
    if wish == "host":
        why = "comm.device_memory=host"
    elif all_on_gpus:
        why = how
    else:
        why = "a rank computes on a CPU"
    return DeviceMemoryChoice("host", f"GPU tensors go through page-locked host memory: {why}")


class DeviceArray:
    """A contiguous tensor in GPU memory that is sent like the numpy array of a tensor in host
    memory.

    Code that slices an array, counts its elements and hands it to mpi4py works with it unchanged.
    """

    def __init__(self, tensor: Any, settle: Callable[[], None], type_name: str = "") -> None:
        """settle: waits until this thread's current stream has finished its work. type_name: a
        NumPy name; by default the tensor's."""
        self.tensor = tensor
        self._settle = settle
        self.type_name = type_name or str(tensor.dtype).removeprefix("torch.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> Any:
        return self.tensor.dtype

    @property
    def size(self) -> int:
        return int(self.tensor.numel())

    @property
    def itemsize(self) -> int:
        return int(self.tensor.element_size())

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    def __len__(self) -> int:
        return len(self.tensor)

    def __getitem__(self, part: slice) -> DeviceArray:
        return self._like(self.tensor[part])

    def __setitem__(self, part: slice, other: DeviceArray) -> None:
        self.tensor[part].copy_(other.tensor)
        self._settle()

    def reshape(self, *shape: int) -> DeviceArray:
        return self._like(self.tensor.view(*shape))

    def as_unsigned(self) -> DeviceArray:
        """Returns a view of the same memory, for collectives that only move it."""
        return DeviceArray(self.tensor, self._settle, f"uint{8 * self.itemsize}")

    def empty(self, *shape: int) -> DeviceArray:
        """Returns new memory of the same type."""
        return self._like(self.tensor.new_empty(shape))

    def _like(self, tensor: Any) -> DeviceArray:
        return DeviceArray(tensor, self._settle, self.type_name)

    def message(self, mpi: Any) -> list[Any]:
        """Returns a one-dimensional message for mpi4py, which forwards the address and does not
        read the memory."""
        types = {"float32": mpi.FLOAT, "float64": mpi.DOUBLE}
        types |= {
            f"{sign}int{bits}": getattr(mpi, f"{sign.upper()}INT{bits}_T")
            for sign in ("", "u")
            for bits in (8, 16, 32, 64)
        }
        buffer = mpi.buffer.fromaddress(self.tensor.data_ptr(), self.nbytes)
        return [buffer, self.size, types[self.type_name]]


def driver_of(kind: str) -> Driver:
    """Returns the driver of the GPUs that the imported torch calls cuda or xpu."""
    if kind == "xpu":
        return "ze"
    return "rocm" if sys.modules["torch"].version.hip else "cuda"
