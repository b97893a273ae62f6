"""The device of a rank, whether another rank shares it, random generators of layers, freed memory,
and torch.compile.

The process keeps freed memory, because returning it to the system and allocating it again cost a
CPU step up to 15,000 page faults. With shard.stage=3, large memory is returned: weights of blocks
are allocated and freed among activations, and would fragment the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.driver_files import HERE, DriverFiles
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.staging import KINDS
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import fold
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Gpu


def pick_device(
    config: Config, communicator: Communicator, files: DriverFiles = HERE
) -> torch.device:
    """Returns the GPU for this rank's local rank, or the CPU.

    Raises UserError if speed.device=cuda or xpu and there is no such GPU. Also raises it if
    speed.device=auto would train on the CPU because this torch does not see the host's GPUs.
    """
    wanted = config.speed.device
    for kind in KINDS if wanted == "auto" else (wanted,) * (wanted in KINDS):
        gpus = torch.get_device_module(kind)
        if count := gpus.device_count():
            device = torch.device(kind, communicator.local_rank % count)
            gpus.set_device(device)
            if kind == "xpu":
                check_float64(device, config)
            if config.speed.deterministic:
                give_same_bits()
            return device
    if wanted in KINDS:
        raise UserError(
            f"no {'CUDA' if wanted == 'cuda' else 'XPU'} device is visible",
            config.where("speed.device"),
            "speed.device=cpu, or a torch built for this GPU",
        )
    if wanted == "auto":
        check_no_gpu_is_hidden(config, files)
    return torch.device("cpu")


def check_float64(device: torch.device, config: Config) -> None:
    """Raises UserError if the GPU lacks float64, which is needed to sum losses. Some Intel GPUs do,
    such as Arc and many integrated GPUs."""
    properties = torch.get_device_module(device).get_device_properties(device)
    if not getattr(properties, "has_fp64", True):
        raise UserError(
            f"{properties.name} has no float64, in which losses are summed",
            config.where("speed.device"),
            "speed.device=cpu",
        )


def check_no_gpu_is_hidden(config: Config, files: DriverFiles = HERE) -> None:
    """Raises UserError if the drivers have files of GPUs, but torch sees none. A wrong build would
    train on the CPU, a hundred times slower, and only one word in the header would show it.

    AMD's driver also serves integrated graphics, so its files count only for a torch that is built
    for AMD.
    """
    hip = torch.version.hip
    hidden = (hip and files.hidden_amd(os.environ)) or files.hidden_nvidia(os.environ)
    if not hidden:
        return
    what = f"this host has GPUs ({hidden}), but torch {torch.__version__} sees none"
    fix = "speed.device=cpu to train on the CPU; "
    builds = {"ROCm": hip, "CUDA": torch.version.cuda, "XPU": getattr(torch.version, "xpu", None)}
    build = next((f"{name} {version}" for name, version in builds.items() if version), "")
    if build:
        what += f", although it is built for {build}"
        fix += (
            "to use them: a driver that supports this build, and GPUs that the job was given "
            "(srun --gpus, docker --gpus all, apptainer --nv)"
        )
    else:
        what += ": it is built for CPUs"
        fix += "to use them: a torch that is built for them (https://pytorch.org/get-started)"
    raise UserError(what, config.where("speed.device"), fix)


def give_same_bits() -> None:
    """From then on, this process uses only deterministic GPU kernels; see no_such_kernel()."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.backends.cudnn.benchmark = False
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)


@contextlib.contextmanager
def no_such_kernel(config: Config) -> Iterator[None]:
    """Raises UserError if torch has no deterministic kernel for an operation inside, and
    speed.deterministic needs one."""
    try:
        yield
    except RuntimeError as error:
        operation, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not found:
            raise
        fix = "speed.deterministic=false, or a model without this operation"
        raise UserError(
            f"torch has no deterministic {operation}", config.where("speed.deterministic"), fix
        ) from error


def gpu(device: torch.device) -> Gpu | None:
    """Returns the GPU for NVML and the trainer; None for the CPU."""
    if device.type not in KINDS:
        return None
    gpus = torch.get_device_module(device)
    name = gpus.get_device_properties(device).name
    uuid = _uuid(device)
    why = "" if uuid else "this torch does not report the identity of the GPU"
    if torch.version.hip or device.type == "xpu":
        uuid = ""
        maker = "Intel" if device.type == "xpu" else "AMD"
        why = f"NVML counts GPUs of NVIDIA, and this one is {maker}'s"
    # name of a part of a GPU: NVIDIA A100-SXM4-40GB MIG 1g.5gb
    kind = "MIG" if " MIG " in name else "GPU"
    return Gpu(f"{kind}-{uuid}" * bool(uuid), why, name, lambda: gpus.max_memory_allocated(device))


def _uuid(device: torch.device) -> str:
    """Returns the UUID of a GPU, or of the part that this process sees; "" if torch does not know
    it."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def describe_device(device: torch.device) -> str:
    """Describes the device: cpu; cuda:0; cuda:0 (ROCm 6.4), torch's name for an AMD GPU; xpu:0
    (Intel)."""
    return str(device) + suffix_of_maker(device)


def suffix_of_maker(device: torch.device) -> str:
    """Returns " (ROCm 6.4)" for an AMD GPU, " (Intel)" for an Intel GPU; empty for the CPU and an
    NVIDIA GPU."""
    if device.type == "xpu":
        return " (Intel)"
    return f" (ROCm {torch.version.hip})" if device.type == "cuda" and torch.version.hip else ""


def dropout_stream(mesh: Mesh, readers: Communicator, config: Config) -> int:
    """Returns the number of a dropout stream, by samples, stage and positions: ranks of a tensor
    group that have all positions use the same."""
    part = mesh.same_samples.rank
    if config.parallel.divides_positions:
        part = part * mesh.tensor.size + mesh.tensor.rank
    return readers.rank + readers.size * (mesh.pipe.rank + mesh.pipe.size * part)


def seed_layers(
    seed: int, mesh: Mesh, readers: Communicator, config: Config, device: torch.device
) -> None:
    """Seeds the random numbers of layers in a step; ranks with different samples have different
    seeds."""
    seed_dropout(fold(seed, dropout_stream(mesh, readers, config)) & (2**63 - 1), device)


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seeds the generators that layers draw from. Takes a hundredth of the time of
    torch.manual_seed(), which looks for devices of every kind."""
    torch.default_generator.manual_seed(seed)
    if device.type in KINDS:
        torch.get_device_module(device).manual_seed(seed)


def fork_rng(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Restores the generators of the CPU and of these GPUs on exit."""
    gpus = sorted({device for device in devices if device.type in KINDS}, key=str)
    kind = gpus[0].type if gpus else KINDS[0]
    return torch.random.fork_rng(devices=gpus, device_type=kind)


class RankGpu(NamedTuple):
    """The GPU of a rank."""

    host: str
    gpu: str | None  # identity of the GPU; None: a CPU, or unknown
    uses_nccl: bool


def check_shared(device: torch.device, communicator: Communicator, where: str) -> None:
    """Raises UserError on every rank if NCCL would reduce for two ranks on one GPU, which it does
    not support. A collective."""
    if communicator.size == 1:
        return
    gpu = (_uuid(device) or None) if device.type == "cuda" else None
    ranks = communicator.allgather_object(
        RankGpu(socket.gethostname(), gpu, "nccl" in communicator.features)
    )
    shared = shared_gpu([(rank.host, rank.gpu) for rank in ranks])
    if shared and any(rank.uses_nccl for rank in ranks):
        fix = "as many ranks on a host as it has GPUs, or comm.engine=mpi, or speed.device=cpu"
        raise UserError(f"{shared}, which NCCL does not support", where, fix)


def all_on_gpus(device: torch.device, communicator: Communicator) -> bool:
    """Whether every rank computes on a GPU. A collective."""
    own = np.array([device.type in KINDS], np.int64)
    return bool(communicator.allreduce(own, "all on GPUs", "min")[0])


def shared_gpu(owners: Sequence[tuple[str, str | None]]) -> str:
    """Returns "ranks 0, 2 on HOST train on one GPU" for the first GPU with two ranks, or "".
    owners: each rank's host and GPU."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, (host, gpu) in enumerate(owners):
        if gpu is not None:
            ranks_of.setdefault((host, gpu), []).append(rank)
    for (host, _), ranks in ranks_of.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} on {host} train on one GPU"
    return ""


# constants of glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# (trim, mmap) in bytes: the limits of glibc's dynamic thresholds
KEPT_BYTES = (2**31 - 1, 2**30)
DEFAULT_BYTES = (64 << 20, 32 << 20)
LARGE_BYTES = 2**18  # bytes
SETTINGS_OF_GLIBC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(wanted: bool = True) -> bool:
    """Makes glibc keep up to 2 GiB of freed memory at the heap's end; returns whether it does.
    Settings in the environment win; no other libc has this."""
    mallopt = _mallopt()
    if mallopt is None:
        return False
    trim, mmap = KEPT_BYTES if wanted else DEFAULT_BYTES
    if (
        mallopt(M_MMAP_THRESHOLD, mmap) != 1 and mallopt(M_MMAP_THRESHOLD, DEFAULT_BYTES[1]) != 1
    ):  # older glibc takes 32 MiB at most
        return False
    return mallopt(M_TRIM_THRESHOLD, trim) == 1 and wanted


def return_large_memory() -> bool:
    """Makes glibc return blocks of LARGE_BYTES or more as soon as they are freed; returns whether
    it does. Settings in the environment win, too.

    12 layers of width 256 and 256 tokens, adamw, stage 3 on 2 ranks: 156 MB of resident memory
    instead of 270; tensors and libraries take 151 of them. The step time is the same
    (benchmarks/memory.md).
    """
    mallopt = _mallopt()
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) == 1


def _mallopt() -> Any:
    """Returns glibc's mallopt(); None if the environment sets malloc options, and with another
    libc."""
    return (
        None
        if any(name in os.environ for name in SETTINGS_OF_GLIBC)
        else getattr(ctypes.CDLL(None), "mallopt", None)
    )


COMPILERS = ("g++", "clang++", "c++")
GRAPHS = ("reduce-overhead", "max-autotune")  # torch.compile's modes with CUDA graphs


def compiled(model: torch.nn.Module, mode: str) -> torch.nn.Module:
    """Returns the model with torch.compile, which compiles it at its first call. That takes a
    minute for each shape; torch caches the result on disk."""
    return model if mode == "none" else torch.compile(model, mode=mode)  # type: ignore[return-value]


def keep_gradients(mode: str, parameters: list[torch.nn.Parameter]) -> None:
    """Called between two passes of a step, because CUDA graphs write the next pass's gradients into
    the memory of this pass's."""
    if mode in GRAPHS and parameters[0].device.type == "cuda":
        for p in parameters:
            p.grad = None if p.grad is None else p.grad.clone()


def check_compiler(config: Config, device: torch.device) -> None:
    """Raises UserError if torch.compile would fail at the first step; it needs a C++ compiler, and
    triton on a GPU."""
    if (
        config.speed.compile != "none"
        and device.type != "cpu"
        and not importlib.util.find_spec("triton")
    ):
        raise UserError(
            "torch.compile on a GPU needs triton",
            config.where("speed.compile"),
            "pip install triton, or speed.compile=none",
        )
    chosen = os.environ.get("CXX", "")
    if config.speed.compile != "none" and not any(
        shutil.which(name) for name in (chosen, *COMPILERS) if name
    ):
        what = (
            "torch.compile needs a C++ compiler; none of "
            + ", ".join(COMPILERS)
            + " is on the path"
        )
        raise UserError(what, config.where("speed.compile"), "install g++, or speed.compile=none")


def compile_summary(mode: str) -> str:
    """Returns text for the line that describes the learner."""
    return "" if mode == "none" else f", compiled ({mode})"
