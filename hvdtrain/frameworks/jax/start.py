"""Starts JAX on a rank with its share of the cores, only its devices, and settings for GPU
memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.driver_files import HERE, DriverFiles
from hvdtrain.config.schema import Config
from hvdtrain.frameworks.learner import asked_threads, fair_threads

_MEMORY = (  # variables by which the user decides how JAX takes memory
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)


def start_jax(
    jax: Any,
    config: Config,
    communicator: Communicator,
    files: DriverFiles = HERE,
) -> None:
    """Starts JAX with this rank's share of the cores and only its devices. Every rank calls it. No
    effect if JAX was already started.

    At its start, JAX creates one thread for each core that the process may use. It does not read
    OMP_NUM_THREADS, and no XLA flag changes the number, but PJRT_NPROC does. The user's PJRT_NPROC
    wins, then OMP_NUM_THREADS.
    """
    fair = fair_threads(communicator)
    variables = {"PJRT_NPROC": str(asked_threads() or fair)}
    opened: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if config.speed.device == "cpu":
        opened = _cpu_only(jax)
    else:
        show_own_gpus(jax, config.speed.devices, communicator.local_rank, files)
        variables |= memory_variables(config.speed.devices, communicator.local_size, files)
    with opened, _environment(variables):
        jax.devices()  # reads them


def show_own_gpus(jax: Any, wanted: int, local_rank: int, files: DriverFiles = HERE) -> None:
    """Lets JAX see only the `wanted` GPUs of this rank, before JAX starts.

    At its first call, JAX opens each visible GPU and allocates 75 % of its memory, so a second rank
    on a host would fail. GPU numbers set by the user win. Shows all GPUs if there are too few, or
    if the driver has no files.
    """
    counts = {
        "jax_cuda_visible_devices": files.visible_nvidia(os.environ),
        "jax_rocm_visible_devices": files.visible_amd(os.environ),
    }
    for name, count in counts.items():
        own = own_gpus(wanted, local_rank, count)
        if own and jax.config.read(name) == "all":
            jax.config.update(name, ",".join(map(str, own)))


def own_gpus(wanted: int, local_rank: int, count: int) -> range:
    """Returns the numbers of a rank's GPUs among `count` visible GPUs; empty if there are too
    few."""
    if count and wanted == 1:
        number = local_rank % count
        return range(number, number + 1)
    # a launcher has limited each rank to its GPUs
    start = 0 if count == wanted else local_rank * wanted
    return range(start, start + wanted) if start + wanted <= count else range(0)


def memory_variables(wanted: int, local_size: int, files: DriverFiles = HERE) -> dict[str, str]:
    """Returns the variable for ranks that may share a GPU, so that each allocates memory on demand.
    A rank with a GPU for itself allocates 75 % of it at the start, JAX's default."""
    count = max(files.visible_nvidia(os.environ), files.visible_amd(os.environ))
    if (
        local_size == 1
        or local_size * wanted <= count
        or any(name in os.environ for name in _MEMORY)
    ):
        return {}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@contextlib.contextmanager
def _cpu_only(jax: Any) -> Iterator[None]:
    """Within the context, JAX starts without GPUs, unless the user has selected platforms."""
    named = jax.config.jax_platforms
    if named:
        yield
        return
    jax.config.update("jax_platforms", "cpu")
    try:
        yield
    finally:
        jax.config.update("jax_platforms", named)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets unset environment variables to these values within the context."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
