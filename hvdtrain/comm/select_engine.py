"""Which engine comm.engine=auto selects, and the reason that the job's header gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hvdtrain.comm.features import Feature, features_of
from hvdtrain.comm.placement import NO_LAUNCHER, TORCH_LAUNCHERS, Placement
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config

_SET_BY_PMI = ("PMIX_RANK", "PMI_RANK")  # by srun --mpi=pmix and --mpi=pmi2


class EngineChoice(NamedTuple):
    engine: str  # as in comm.engine=NAME
    reason: str


class Installed(NamedTuple):
    """What this machine has; each is called only where the choice depends on it."""

    horovod: Callable[[], bool]  # Horovod is installed
    horovod_nccl: Callable[[], bool]  # Horovod was built with NCCL
    nccl: Callable[[], bool]  # torch has a GPU and NCCL, and the job uses them


def select_engine(
    place: Placement, environ: Mapping[str, str], installed: Installed, needs: frozenset[Feature] = frozenset()
) -> EngineChoice:
    """The engine of comm.engine=auto; `needs`: what the job asks of it."""
    if place.launcher == NO_LAUNCHER.launcher:
        return EngineChoice("single", "no launcher")
    started = f"started by {place.launcher}"
    if place.launcher in TORCH_LAUNCHERS:
        return EngineChoice("torchdist", started)
    if place.launcher == "srun" and not any(key in environ for key in _SET_BY_PMI):
        return EngineChoice("torchdist", f"{started} without MPI (srun --mpi=pmix or --mpi=pmi2 would start it)")
    horovod = installed.horovod()
    lacking = "Horovod was built without NCCL" if horovod else "Horovod is not installed"
    if place.launcher != "horovodrun" and installed.nccl() and not (horovod and installed.horovod_nccl()):
        return EngineChoice("torchdist", f"{started}, there are GPUs, and {lacking} (python -m hvdtrain.cli.horovod --nccl builds it)")
    missing = ", ".join(sorted(needs - features_of("horovod")))
    if horovod and (not missing or place.launcher == "horovodrun"):
        return EngineChoice("horovod", f"{started}, Horovod is installed")
    why = f"the job needs {missing}, which Horovod has not" if horovod else f"{lacking} (python -m hvdtrain.cli.horovod builds it)"
    return EngineChoice("mpi", f"{started}, {why}")


def possible_engines(engine: str, ranks: int) -> list[str]:
    """What comm.engine=`engine` may select for so many ranks where the launcher is not known: for auto every engine that connects them."""
    if engine != "auto":
        return [engine]
    if ranks == 1:
        return ["single"]
    return [name for name in plugins.files("comm") if "several_ranks" in features_of(name)]


def installed_here(config: Config) -> Installed:
    """What is installed on this machine; the engines' modules are imported when asked."""
    return Installed(
        horovod=lambda: importlib.util.find_spec("horovod") is not None,
        horovod_nccl=lambda: bool(plugins.load("comm", "horovod", "comm.engine").has_nccl()),
        nccl=lambda: may_use_gpu(config) and bool(plugins.load("comm", "torchdist", "comm.engine").has_nccl()),
    )


def may_use_gpu(config: Config) -> bool:
    """Whether the collectives are of tensors in a GPU's memory, where a rank has one."""
    return config.framework == "torch" and config.speed.device != "cpu"


def needed_features(config: Config) -> frozenset[Feature]:
    """Which not every engine has."""
    needs = set[Feature]()
    if config.parallel.pipeline > 1 or config.servers.count:
        needs.add("p2p")
    if config.guard.lost != "stop":
        needs.add("shrink")
    return frozenset(needs)
