"""Broadcasts variables of Keras and TensorFlow from one rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import synchronize
from hvdtrain.horovod.collectives import broadcast_async
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.libraries import as_written, value_of
from hvdtrain.horovod.traced.on_host import on_host


@as_written
def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = True,
) -> None:
    """Sets each variable to its value on rank `root_rank`.

    Every rank passes the same number of variables, with the same shapes and dtypes, in the same
    order. inplace: has no effect, because it is always in place.
    """
    found = list(variables)
    if JOB.engine.size == 1 or not found:
        return

    def send(values: list[Any]) -> list[Any]:
        handles = [
            broadcast_async(
                value, root_rank, f"variable {number} {_name_of(variable)}", process_set
            )
            for number, (variable, value) in enumerate(zip(found, values, strict=True))
        ]
        return [synchronize(handle) for handle in handles]

    sent = on_host(send, [value_of(variable) for variable in found], call="broadcast of variables")
    for variable, value in zip(found, sent, strict=True):
        variable.assign(value)


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raises BadCall, as Horovod's own raises an error with TensorFlow 2."""
    what = (
        "global variables belong to TensorFlow 1; use the variables of the model and its optimizer"
    )
    fix = (
        "hvd.broadcast_variables([*model.weights, *optimizer.variables], root_rank=0), or "
        "callbacks.BroadcastGlobalVariablesCallback(0)"
    )
    raise BadCall(what, "hvd.broadcast_global_variables()", fix)


def _name_of(variable: Any) -> str:
    return str(getattr(variable, "path", variable.name))
