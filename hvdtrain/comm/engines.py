"""The optional features of engines, and the choice that comm.engine=auto makes. Code asks for a
feature, never for an engine's name."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Mapping
from functools import cache
from typing import Literal, NamedTuple, cast

from hvdtrain.comm.launcher_variables import NO_LAUNCHER, TORCH_LAUNCHERS, Placement
from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.core.syntax_tree import syntax_tree

Feature = Literal[
    "several_ranks", "device_memory", "nccl", "asynchronous", "bfloat16_sums", "adasum", "horovod_api", "ddp", "plain_mpi", "p2p", "shrink"  # noqa: E501
]  # fmt: skip
MEANINGS: dict[Feature, str] = {
    "several_ranks": "connects two processes or more",
    "device_memory": "takes tensors in GPU memory; without it they are copied to host memory for "
    "each collective. mpi has it where a rank "
    "computes on a GPU",
    "nccl": "reduces tensors in GPU memory by NCCL, which does not support two ranks on one GPU; "
    "on GPUs of Intel by oneCCL",
    "asynchronous": "start_allreduce() returns at once, and the sum is computed while the caller "
    "continues; without it the caller waits",
    "bfloat16_sums": "allreduce and start_reduce_scatter sum bfloat16",
    "adasum": "allreduce has op=adasum",
    "horovod_api": "Horovod runs: hvd.DistributedOptimizer, hvd.grouped_allreduce, and the "
    "settings comm.cycle_ms, fusion_mb, hierarchical",
    "ddp": "torch.distributed runs with these ranks, so that DistributedDataParallel does",
    "plain_mpi": "its collectives are plain mpi4py calls on numpy arrays",
    "p2p": "one rank sends to another one: start_send() and start_recv()",
    "shrink": "surviving ranks continue after others die: be_ready_to_shrink() and shrink()",
}
_SET_BY_PMI = ("PMIX_RANK", "PMI_RANK")  # set by srun --mpi=pmix and --mpi=pmi2


@cache
def features_of(engine: str) -> frozenset[Feature]:
    """Returns the features that comm.engine=`engine` has on every machine: FEATURES of its file,
    read without importing torch or MPI.

    A connected engine may have more (Communicator.features). Raises UserError if there is no such
    engine.
    """
    tree = syntax_tree(plugins.find("comm", engine, "comm.engine").read_text())
    assigned = {
        node.target.id: node.value
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    value = assigned["FEATURES"]
    assert value is not None, engine
    return frozenset(ast.literal_eval(value))


# Batch systems' variables for the number of tasks in a job, in which a process may have been
# started alone.
_TASKS = ("SLURM_NTASKS", "PBS_NP", "LSB_DJOB_NUMPROC", "NSLOTS")


class EngineChoice(NamedTuple):
    engine: str  # name, as in comm.engine=NAME
    reason: str


class Installed(NamedTuple):
    """Checks of the software on this machine; each runs only if the choice depends on it."""

    horovod: Callable[[], bool]  # Horovod is installed
    horovod_nccl: Callable[[], bool]  # Horovod was built with NCCL
    nccl: Callable[[], bool]  # torch has a GPU and NCCL, and the job uses them


def select_engine(
    place: Placement,
    environ: Mapping[str, str],
    installed: Installed,
    needs: frozenset[Feature] = frozenset(),
) -> EngineChoice:
    """Selects the engine for comm.engine=auto. needs: the features that the job requires."""
    if place.launcher == NO_LAUNCHER.launcher:
        tasks = next(
            (f"{key}={environ[key]}" for key in _TASKS if environ.get(key, "1") != "1"), None
        )
        return EngineChoice(
            "single",
            f"no launcher ({tasks}: hvdtrain launch would start as many ranks)"
            if tasks
            else "no launcher",
        )
    started = f"started by {place.launcher}"
    if place.launcher in TORCH_LAUNCHERS:
        return EngineChoice("torchdist", started)
    if place.launcher == "srun" and not any(key in environ for key in _SET_BY_PMI):
        return EngineChoice(
            "torchdist", f"{started} without MPI (srun --mpi=pmix or --mpi=pmi2 would start it)"
        )
    horovod = installed.horovod()
    lacking = "Horovod was built without NCCL" if horovod else "Horovod is not installed"
    if (
        place.launcher != "horovodrun"
        and installed.nccl()
        and not (horovod and installed.horovod_nccl())
    ):
        return EngineChoice(
            "torchdist",
            f"{started}, there are GPUs, and {lacking} (python -m hvdtrain.cli.horovod --nccl "
            "builds it)",
        )
    missing = ", ".join(sorted(needs - features_of("horovod")))
    if horovod and (not missing or place.launcher == "horovodrun"):
        return EngineChoice("horovod", f"{started}, Horovod is installed")
    why = (
        f"the job needs {missing}, which Horovod does not support"
        if horovod
        else f"{lacking} (python -m hvdtrain.cli.horovod builds it)"
    )
    return EngineChoice("mpi", f"{started}, {why}")


def possible_engines(engine: str, ranks: int) -> list[str]:
    """Returns the engines that comm.engine=`engine` may select for this number of ranks when the
    launcher is unknown; for auto, every engine that can connect them."""
    if engine != "auto":
        return [engine]
    if ranks == 1:
        return ["single"]
    return [name for name in plugins.files("comm") if "several_ranks" in features_of(name)]


def installed_here(config: Config) -> Installed:
    """Returns the checks for this machine; the engines' modules are imported on demand."""
    return Installed(
        horovod=lambda: importlib.util.find_spec("horovod") is not None,
        horovod_nccl=lambda: bool(plugins.load("comm", "horovod", "comm.engine").has_nccl()),
        nccl=lambda: (
            may_use_gpu(config)
            and bool(plugins.load("comm", "torchdist", "comm.engine").has_nccl())
        ),
    )


def may_use_gpu(config: Config) -> bool:
    """Whether collectives take tensors in GPU memory on ranks that have a GPU."""
    return config.framework == "torch" and config.speed.device != "cpu"


def needed_features(config: Config) -> frozenset[Feature]:
    """Returns the features that the job needs and that some engines lack."""
    needs = {name for section in config.sections for name in section.needed_of_engine}
    return frozenset(cast("set[Feature]", needs))
