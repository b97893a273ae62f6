"""The parameters and the optimizer state of one rank on all of them, as data: nothing is stepped for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdtrain.horovod.broadcasts import broadcast_async_
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.handles import synchronize
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.object_forms import packed
from hvdtrain.horovod.objects import broadcast_object
from hvdtrain.horovod.parameter_groups import load_in_place
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set


def broadcast_parameters(params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """model.state_dict(), model.named_parameters() or model.parameters(), in place. What is no tensor in a state_dict is left alone."""
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise BadCall(
            f"invalid params of type {type(params)}", "hvd.broadcast_parameters()", "model.state_dict() or model.named_parameters()"
        )
    if isinstance(params, Mapping):
        named = sorted(params.items())
    else:
        named = [each if isinstance(each, tuple) else (None, each) for each in params]
    handles = [
        broadcast_async_(tensor.detach(), root_rank, None if name is None else f"broadcast.{name}", process_set)
        for name, tensor in named
        if isinstance(tensor, torch.Tensor)
    ]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None, process_set: ProcessSet = global_process_set
) -> None:
    """The state and the settings of its groups: a state that only the root has appears on the others. `model` is not needed.

    Horovod's steps a fresh optimizer to make its state, which changes the weights. Raises ValueError for LBFGS, as Horovod does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadCall("cannot broadcast torch.optim.LBFGS state", "hvd.broadcast_optimizer_state()", "another optimizer")
    state = optimizer.state_dict()
    is_root = JOB.engine.rank == root_rank
    tensors = _tensors(state) if is_root else {}
    frame = broadcast_object(_without_tensors(state) if is_root else None, root_rank, None, process_set)
    places: dict[str, tuple[str, tuple[int, ...]]] = broadcast_object(
        {key: (str(tensor.dtype), tuple(tensor.shape)) for key, tensor in tensors.items()}, root_rank, None, process_set
    )
    for key, (dtype, shape) in places.items():
        if not is_root:
            tensors[key] = torch.empty(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
    wire = {key: tensors[key].detach().cpu().contiguous() for key in places}
    broadcast_parameters({f"optimizer.{key}": tensor for key, tensor in wire.items()}, root_rank, process_set)
    if not is_root:
        own, sent = ([len(group["params"]) for group in each["param_groups"]] for each in (state, frame))
        if own != sent:
            what = f"the optimizer has groups of {own[:8]} parameters here, of {sent[:8]} on rank {root_rank}"
            raise BadCall(what, "hvd.broadcast_optimizer_state()", "the same groups on every rank")
        groups = [{**own, **sent} for own, sent in zip(state["param_groups"], frame["param_groups"], strict=True)]
        filled = {"state": _with_tensors(frame["state"], wire), "param_groups": groups}
        load_in_place(optimizer, lambda: torch.optim.Optimizer.load_state_dict(optimizer, filled))


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Those of each parameter's state, under "number.name"."""
    return {
        f"{number}.{name}": value
        for number, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def _without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    entries = {
        number: {name: None if isinstance(value, torch.Tensor) else value for name, value in each.items()}
        for number, each in state["state"].items()
    }
    groups = [{key: value for key, value in group.items() if _is_data(value)} for group in state["param_groups"]]
    return {"state": entries, "param_groups": groups}


def _is_data(value: Any) -> bool:
    """Not a function, which a group may have: each rank has its own."""
    try:
        packed(value, "")
    except Exception:
        return False
    return True


def _with_tensors(entries: dict[Any, dict[str, Any]], tensors: Mapping[str, torch.Tensor]) -> dict[Any, dict[str, Any]]:
    return {number: {name: tensors.get(f"{number}.{name}", value) for name, value in each.items()} for number, each in entries.items()}
