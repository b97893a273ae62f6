"""Which engine comm.engine=auto means, and why."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvdtrain.comm.features import features_of
from hvdtrain.comm.placement import Placement
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config

_MPI_IS_THERE = ("PMIX_RANK", "PMI_RANK")  # srun --mpi=pmix and --mpi=pmi2 set them


class Installed(NamedTuple):
    """What this machine has; asked only where it matters."""

    horovod: Callable[[], bool]  # is installed
    horovod_nccl: Callable[[], bool]  # was built with NCCL
    nccl: Callable[[], bool]  # torch has a GPU and NCCL, and the job would use both


def select_engine(place: Placement, environ: Mapping[str, str], found: Installed) -> tuple[str, str]:
    """(engine, why)"""
    if place.launcher == "none":
        return "single", "no launcher"
    started = f"started by {place.launcher}"
    if place.launcher == "torchrun":
        return "torchdist", started
    if place.launcher == "srun" and not any(key in environ for key in _MPI_IS_THERE):
        return "torchdist", f"{started} without MPI (srun --mpi=pmix or --mpi=pmi2 would start it)"
    horovod = found.horovod()
    without = "Horovod was built without NCCL" if horovod else "Horovod is not installed"
    if place.launcher != "horovodrun" and found.nccl() and not (horovod and found.horovod_nccl()):
        return "torchdist", f"{started}, there are GPUs, and {without} (python -m hvdtrain.cli.horovod --nccl builds it)"
    if horovod:
        return "horovod", f"{started}, Horovod is installed"
    return "mpi", f"{started}, {without} (python -m hvdtrain.cli.horovod builds it)"


def possible_engines(engine: str, ranks: int) -> list[str]:
    """What comm.engine=`engine` may mean for so many ranks under a launcher that is not known: for auto every engine that connects them."""
    if engine != "auto":
        return [engine]
    if ranks == 1:
        return ["single"]
    return [name for name in plugins.files("comm") if "several_ranks" in features_of(name)]


def installed_here(config: Config) -> Installed:
    """Asks the engines themselves."""
    wanted = config.framework == "torch" and config.speed.device != "cpu"
    return Installed(
        horovod=lambda: importlib.util.find_spec("horovod") is not None,
        horovod_nccl=lambda: bool(plugins.load("comm", "horovod", "comm.engine").has_nccl()),
        nccl=lambda: wanted and bool(plugins.load("comm", "torchdist", "comm.engine").has_nccl()),
    )
