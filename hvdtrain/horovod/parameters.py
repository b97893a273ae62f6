"""Broadcasts parameters and optimizer state from one rank to all, as data: no optimizer step is
taken for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from hvdtrain.errors import UserError
from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import synchronize
from hvdtrain.horovod.collectives import broadcast_async_
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.requests import name_of
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.objects import broadcast_object, to_bytes
from hvdtrain.horovod.optimizer import AdasumSteps, GradientSteps, load_in_place

# 1: a new optimizer takes a step as in Horovod, to compare losses with Horovod's
EMPTY_STEP = "HVDTRAIN_HOROVOD_EMPTY_STEP"


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcasts model.state_dict(), model.named_parameters() or model.parameters(), in place.
    Values of a state_dict that are not tensors are left alone.

    Raises ValueError for arguments without tensors, such as a module or an optimizer's state_dict.
    """
    handles = [
        broadcast_async_(
            tensor.detach(), root_rank, None if name is None else f"broadcast.{name}", process_set
        )
        for name, tensor in _named(params)
    ]
    for handle in handles:
        synchronize(handle)


def _named(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    if isinstance(params, Mapping):
        tensors = [
            (name, value)
            for name, value in sorted(params.items())
            if isinstance(value, torch.Tensor)
        ]
        if tensors or not params:
            return tensors
        raise _invalid("a mapping without tensors")
    if isinstance(params, (torch.Tensor, torch.nn.Module, str)) or not isinstance(params, Iterable):
        raise _invalid(f"invalid params of type {type(params)}")
    named = [
        each if isinstance(each, tuple) and len(each) == 2 else (None, each) for each in params
    ]
    for _, value in named:
        if not isinstance(value, torch.Tensor):
            raise _invalid(f"invalid params: a {type(value).__name__} among them")
    return named


def _invalid(what: str) -> BadCall:
    fix = (
        "model.state_dict() or model.named_parameters(); of an optimizer: "
        "hvd.broadcast_optimizer_state(optimizer, 0)"
    )
    return BadCall(what, "hvd.broadcast_parameters()", fix)


class _StateTensorSpec(NamedTuple):
    """Place of a tensor in the state of the root's optimizer."""

    dtype: str
    shape: tuple[int, ...]
    on_host: bool  # as the numbers of steps are, else on the parameter's device


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Broadcasts the state and the settings of groups; state that only the root has is created on
    the others. `model` is not needed.

    Horovod steps a fresh optimizer to create its state, which changes the weights; this does so
    only if EMPTY_STEP is 1.

    Raises ValueError for LBFGS, as Horovod does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BadCall(
            "cannot broadcast torch.optim.LBFGS state",
            "hvd.broadcast_optimizer_state()",
            "another optimizer",
        )
    name = "broadcast_optimizer_state"
    if _makes_empty_step(os.environ):
        # ranks that differ in it wait for different names, which is reported
        name = "broadcast_optimizer_state after an empty step"
        if not optimizer.state_dict()["state"]:
            _step_empty(optimizer, model)
    state = optimizer.state_dict()
    is_root = JOB.engine.rank == root_rank
    tensors = _tensors(state) if is_root else {}
    frame = broadcast_object(
        _without_tensors(state) if is_root else None, root_rank, name, process_set
    )
    sent_places: dict[str, tuple[Any, ...]] = broadcast_object(
        {
            key: tuple(_StateTensorSpec(name_of(tensor.dtype), tuple(tensor.shape), tensor.is_cpu))
            for key, tensor in tensors.items()
        },
        root_rank,
        None,
        process_set,
    )
    places = {key: _StateTensorSpec(*sent) for key, sent in sent_places.items()}
    for key, place in places.items():
        if not is_root:
            tensors[key] = torch.empty(place.shape, dtype=getattr(torch, place.dtype), device="cpu")
    wire = {key: tensors[key].detach().cpu().contiguous() for key in places}
    broadcast_parameters(
        {f"optimizer.{key}": tensor for key, tensor in wire.items()}, root_rank, process_set
    )
    if not is_root:
        own, sent = (
            [len(group["params"]) for group in each["param_groups"]] for each in (state, frame)
        )
        if own != sent:
            what = (
                f"the optimizer has groups of {own[:8]} parameters here, but of {sent[:8]} on "
                f"rank {root_rank}"
            )
            raise BadCall(what, "hvd.broadcast_optimizer_state()", "the same groups on every rank")
        groups = [
            {**own, **sent}
            for own, sent in zip(state["param_groups"], frame["param_groups"], strict=True)
        ]
        filled = {"state": _with_tensors(frame["state"], wire), "param_groups": groups}
        load_in_place(optimizer, lambda: torch.optim.Optimizer.load_state_dict(optimizer, filled))
        _put_as_sent(optimizer, wire, places)


def _makes_empty_step(environ: Mapping[str, str]) -> bool:
    """Reads EMPTY_STEP. Raises UserError for a value that is neither 0 nor 1."""
    value = environ.get(EMPTY_STEP, "0")
    if value not in ("0", "1"):
        raise UserError(
            f"{EMPTY_STEP}={value!r} is neither 0 nor 1",
            "the environment",
            "1: a new optimizer makes an empty step, as with Horovod",
        )
    return value == "1"


def _step_empty(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Takes a step as Horovod does, with gradients of 0, which stay. model: tells which parameters
    of SGD have sparse gradients."""
    embeddings = [
        module
        for module in (model.modules() if model is not None else ())
        if isinstance(module, torch.nn.Embedding)
    ]
    sparse = {id(module.weight) for module in embeddings if module.sparse}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                is_sparse = isinstance(optimizer, torch.optim.SparseAdam) or (
                    isinstance(optimizer, torch.optim.SGD) and id(parameter) in sparse
                )
                zeros = torch.zeros_like(parameter)
                parameter.grad = zeros.to_sparse() if is_sparse else zeros
    kind: Any = type(optimizer)
    if isinstance(optimizer, (GradientSteps, AdasumSteps)):
        _, kind = (
            kind.__bases__
        )  # the wrapped optimizer's class, whose step() does not wait for ranks
    kind.step(optimizer)


def _put_as_sent(
    optimizer: torch.optim.Optimizer,
    wire: Mapping[str, torch.Tensor],
    places: Mapping[str, _StateTensorSpec],
) -> None:
    """Tensors by "number.name". load_state_dict() has given them the dtypes and devices of the
    parameters."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, place in places.items():
        number, _, name = key.partition(".")
        parameter = parameters[int(number)]
        optimizer.state[parameter][name] = (
            wire[key] if place.on_host else wire[key].to(parameter.device)
        )


def _tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns tensors of each parameter's state, under "number.name"."""
    return {
        f"{number}.{name}": value
        for number, entries in state["state"].items()
        for name, value in entries.items()
        if isinstance(value, torch.Tensor)
    }


def _without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    entries = {
        number: {
            name: None if isinstance(value, torch.Tensor) else value for name, value in each.items()
        }
        for number, each in state["state"].items()
    }
    groups = [
        {key: value for key, value in group.items() if _can_be_sent(value, index, key)}
        for index, group in enumerate(state["param_groups"])
    ]
    return {"state": entries, "param_groups": groups}


def _can_be_sent(value: Any, group: int, key: str) -> bool:
    """Whether a value can be sent. A lambda cannot, while Horovod's cloudpickle sends it; this rank
    then prints a line."""
    try:
        to_bytes(value, JOB.engine.secret, "", "")
    except Exception:
        print(
            f"hvdtrain.horovod: broadcast_optimizer_state does not send param_groups[{group}]"
            f"[{key!r}], of {type(value).__name__}: every rank keeps its own",
            file=sys.stderr,
            flush=True,
        )
        return False
    return True


def _with_tensors(
    entries: dict[Any, dict[str, Any]], tensors: Mapping[str, torch.Tensor]
) -> dict[Any, dict[str, Any]]:
    return {
        number: {name: tensors.get(f"{number}.{name}", value) for name, value in each.items()}
        for number, each in entries.items()
    }
