"""The parts of Horovod that are not available, with the reason and the alternative."""

from __future__ import annotations

from typing import NoReturn

_LAUNCHERS = (
    "mpirun -np 4 python script.py, torchrun, srun, or hvdtrain launch (docs/horovod-api.md)"
)
_PARTS = {
    "mxnet": (
        "Apache MXNet was retired in 2023",
        "hvdtrain.horovod for torch, hvdtrain.horovod.keras or hvdtrain.horovod.tensorflow "
        "(docs/horovod-api.md)",
    ),
    "run": (
        "a function is not sent to other processes",
        f"a script that calls the function after hvd.init(), started by {_LAUNCHERS}",
    ),
    "runner": ("hvdtrain has no launcher of its own for scripts of Horovod", _LAUNCHERS),
    "spark": (
        "there are no Estimators and no ranks in executors of Spark",
        f"data written by Spark (docs/data.md), and {_LAUNCHERS}",
    ),
    "ray": (
        "there are no ranks in actors of Ray",
        f"{_LAUNCHERS}; in a job of Ray, torchrun on each node (docs/clusters.md)",
    ),
}


def not_built(name: str) -> str | None:
    """Returns the message for a part of Horovod that is not available; None for another name."""
    if name not in _PARTS:
        return None
    why, fix = _PARTS[name]
    return f"hvdtrain.horovod.{name} is not built: {why}\n  fix: {fix}"


def refuse_import(module: str) -> NoReturn:
    """Raises ImportError for a module hvdtrain.horovod.NAME that is not built."""
    raise ImportError(not_built(module.rsplit(".", maxsplit=1)[-1]), name=module)
