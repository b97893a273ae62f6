"""The device of a rank, and whether another rank shares it; random generators of layers; freed
memory; torch.compile.

Freed memory stays with the process: returning it to the system and asking for it again cost a CPU
step up to 15,000 page faults. With shard.stage=3 large memory does not stay: weights of blocks come
and go among activations, and would leave holes between them.
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
    """The GPU of this rank's local rank, or the CPU.

    Raises UserError if speed.device=cuda or xpu and there is none, and if speed.device=auto would
    train on the CPU because this torch does not see the GPUs of the host.
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
    """Raises UserError if the GPU has no float64, in which losses are summed: some of Intel do not,
    such as Arc and many of those in processors."""
    properties = torch.get_device_module(device).get_device_properties(device)
    if not getattr(properties, "has_fp64", True):
        raise UserError(
            f"{properties.name} has no float64, in which losses are summed",
            config.where("speed.device"),
            "speed.device=cpu",
        )


def check_no_gpu_is_hidden(config: Config, files: DriverFiles = HERE) -> None:
    """Raises UserError if the drivers have files of GPUs, but torch sees none: a wrong build would
    train on the CPU, a hundred times slower, and say so in one word of the header.

    AMD's driver also serves the graphics of processors, so its files count only for a torch that is
    built for them.
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
    """From here on this process computes with deterministic kernels of the GPU alone; see
    no_such_kernel()."""
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
    """The device as NVML and the trainer know it; None for the CPU."""
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
    # of a part of a GPU: NVIDIA A100-SXM4-40GB MIG 1g.5gb
    kind = "MIG" if " MIG " in name else "GPU"
    return Gpu(f"{kind}-{uuid}" * bool(uuid), why, name, lambda: gpus.max_memory_allocated(device))


def _uuid(device: torch.device) -> str:
    """UUID of a GPU, or of the part of one that this process sees; "" where torch does not know
    it."""
    properties = torch.get_device_module(device).get_device_properties(device)
    return str(getattr(properties, "uuid", ""))


def describe_device(device: torch.device) -> str:
    """cpu; cuda:0; cuda:0 (ROCm 6.4), as torch calls a GPU of AMD; xpu:0 (Intel)."""
    return str(device) + suffix_of_maker(device)


def suffix_of_maker(device: torch.device) -> str:
    """ " (ROCm 6.4)" for a GPU of AMD, " (Intel)"; empty for the CPU and a GPU of NVIDIA."""
    if device.type == "xpu":
        return " (Intel)"
    return f" (ROCm {torch.version.hip})" if device.type == "cuda" and torch.version.hip else ""


def dropout_stream(mesh: Mesh, readers: Communicator, config: Config) -> int:
    """A number for dropout, of samples, stage and positions: ranks of a tensor group that have all
    positions drop the same."""
    part = mesh.tensor.rank if config.parallel.sequence else 0
    return readers.rank + readers.size * (mesh.pipe.rank + mesh.pipe.size * part)


def seed_layers(
    seed: int, mesh: Mesh, readers: Communicator, config: Config, device: torch.device
) -> None:
    """Seeds the random numbers of layers in a step; ranks with different samples have different
    seeds."""
    seed_dropout(fold(seed, dropout_stream(mesh, readers, config)) & (2**63 - 1), device)


def seed_dropout(seed: int, device: torch.device) -> None:
    """Seeds the generators that layers draw from. A hundredth of the time of torch.manual_seed(),
    which looks for devices of every kind."""
    torch.default_generator.manual_seed(seed)
    if device.type in KINDS:
        torch.get_device_module(device).manual_seed(seed)


def fork_rng(devices: Iterable[torch.device]) -> AbstractContextManager[None]:
    """Inside, the generators of the CPU and of these GPUs may draw; then they are as before."""
    gpus = sorted({device for device in devices if device.type in KINDS}, key=str)
    kind = gpus[0].type if gpus else KINDS[0]
    return torch.random.fork_rng(devices=gpus, device_type=kind)


class RankGpu(NamedTuple):
    """The GPU of a rank."""

    host: str
    gpu: str | None  # its identity; None: a CPU, or not known
    uses_nccl: bool


def check_shared(device: torch.device, communicator: Communicator, where: str) -> None:
    """Raises UserError on every rank where NCCL, which refuses that, would reduce for two ranks on
    one GPU. A collective."""
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
    """A text, "ranks 0, 2 on HOST train on one GPU", for the first GPU of two ranks, or "";
    `owners` has each rank's host and GPU."""
    ranks_of: dict[tuple[str, str], list[int]] = {}
    for rank, (host, gpu) in enumerate(owners):
        if gpu is not None:
            ranks_of.setdefault((host, gpu), []).append(rank)
    for (host, _), ranks in ranks_of.items():
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks))} on {host} train on one GPU"
    return ""


# of glibc's malloc.h
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
# (trim, mmap): bytes; what glibc's own thresholds grow to at most
KEPT_BYTES = (2**31 - 1, 2**30)
DEFAULT_BYTES = (64 << 20, 32 << 20)
LARGE_BYTES = 2**18  # bytes
SETTINGS_OF_GLIBC = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(wanted: bool = True) -> bool:
    """Whether glibc now keeps up to 2 GiB of freed memory at the heap's end. Settings in the
    environment win; no other libc has this."""
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
    """Whether glibc now returns what has LARGE_BYTES or more as soon as it is freed. Settings in
    the environment win here, too.

    12 layers of width 256 and 256 tokens, adamw, stage 3 on 2 ranks: 156 MB of resident memory
    instead of 270, and 151 of it are tensors and libraries. The time of a step is the same
    (benchmarks/memory.md).
    """
    mallopt = _mallopt()
    return mallopt is not None and mallopt(M_MMAP_THRESHOLD, LARGE_BYTES) == 1


def _mallopt() -> Any:
    """glibc's; None if the environment has settings of its own, and with another libc."""
    return (
        None
        if any(name in os.environ for name in SETTINGS_OF_GLIBC)
        else getattr(ctypes.CDLL(None), "mallopt", None)
    )


COMPILERS = ("g++", "clang++", "c++")
GRAPHS = ("reduce-overhead", "max-autotune")  # torch.compile's modes with CUDA graphs


def compiled(model: torch.nn.Module, mode: str) -> torch.nn.Module:
    """The model, which torch.compile turns into kernels at its first call: a minute, once for each
    shape, kept on disk by torch."""
    return model if mode == "none" else torch.compile(model, mode=mode)  # type: ignore[return-value]


def keep_gradients(mode: str, parameters: list[torch.nn.Parameter]) -> None:
    """Between two passes of a step: CUDA graphs write the next pass's gradients into the memory of
    this one's."""
    if mode in GRAPHS and parameters[0].device.type == "cuda":
        for p in parameters:
            p.grad = None if p.grad is None else p.grad.clone()


def check_compiler(config: Config, device: torch.device) -> None:
    """Raises UserError if torch.compile would fail at the first step: it calls a C++ compiler,
    and on a GPU triton."""
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
    """For the line that describes the learner."""
    return "" if mode == "none" else f", compiled ({mode})"
