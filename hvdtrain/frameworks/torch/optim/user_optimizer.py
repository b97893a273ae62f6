"""A user's own class of torch.optim: how it is made of options, and what a checkpoint can hold of the entries that it keeps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError

OWN_KEYS = {"params", "excluded", "follow", "made"}  # of a user's parameter groups
KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float}  # a bool is an int: it comes first
FIX = "give the optimizer and options that the checkpoint was made with"


class Made(NamedTuple):
    """How the optimizer of a parameter group was made: the group's entry "made", which hvd.DistributedOptimizer leaves there."""

    make: Callable[..., Any]
    arguments: dict[str, Any]  # of the constructor, but for the groups
    options: tuple[str, ...]  # those of the arguments that only the constructor is given
    initial: dict[str, float]  # the group's numbers after it

    @property
    def path(self) -> str:
        """The import path of the class, however the user wrote it."""
        return f"{self.make.__module__}.{self.make.__qualname__}"


def construct(make: Callable[..., Any], name: str, parts: list[dict[str, Any]], config: Config, where: str) -> torch.optim.Optimizer:
    """What the class makes of groups and options, each group with its Made, or a UserError that tells its signature."""
    signature = signature_of(make)
    if signature is None or not issubclass(make, torch.optim.Optimizer):  # type: ignore[arg-type]
        what = f"{name}{signature or '(...)'} is no class of torch.optim.Optimizer"
        raise UserError(what, where, "give one, as in optim.name=torch.optim.RMSprop")
    if any(argument.default is argument.empty for argument in list(inspect.signature(make.step).parameters.values())[1:]):  # type: ignore[attr-defined]
        raise UserError(
            f"{name} wants a closure to compute the loss again within a step", where, "give an optimizer of one gradient a step"
        )
    made = Made(make, arguments(signature, config), tuple(config.optim.options), {})
    try:
        signature.bind(parts, **made.arguments)
        optimizer: torch.optim.Optimizer = make(parts, **made.arguments)
    except Exception as error:  # what a constructor says of a number that makes no sense: torch a ValueError, others what they like
        words = f"{error}" if isinstance(error, (TypeError, ValueError)) else f"{type(error).__name__}: {error}"
        raise UserError(f"{name}{signature} does not fit: {words}", where, "give its parameters as optim.<name>=<value>") from error
    for group in optimizer.param_groups:
        group["made"] = made._replace(initial=numbers(group))
    return optimizer


def signature_of(make: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a class; None for what is no class, or one of C that has none."""
    try:
        return inspect.signature(make) if inspect.isclass(make) else None
    except ValueError:
        return None


def arguments(signature: inspect.Signature, config: Config) -> dict[str, Any]:
    """What the constructor is given: the options, and of rate and momentum what it has, since it may check one against the other."""
    given, momentum = dict(config.optim.options), config.optim.momentum
    if "lr" in signature.parameters:
        given["lr"] = config.optim.base_lr
    if momentum is not None and "momentum" in signature.parameters:
        given["momentum"] = momentum
    elif momentum is not None and "betas" in signature.parameters:
        betas = given.get("betas", signature.parameters["betas"].default)
        if isinstance(betas, (tuple, list)):
            given["betas"] = (momentum, *betas[1:])
    return given


def followed(group: dict[str, Any], name: str, config: Config, provenance: Provenance) -> tuple[str, ...]:
    """The fields of Hyper that a group of a user's class takes."""
    has = {"lr": "lr" in group, "weight_decay": "weight_decay" in group, "momentum": not {"momentum", "betas"}.isdisjoint(group)}
    wanted = {"lr": True, "weight_decay": config.optim.weight_decay > 0, "momentum": config.optim.momentum is not None}
    for key, want in wanted.items():
        if want and not has[key]:
            where = provenance.where("optim.name" if key == "lr" else f"optim.{key}")
            fix = "give another class" if key == "lr" else f"leave optim.{key} out, or give another class"
            raise UserError(f"{name} has no {key}; it has {', '.join(sorted(group.keys() - OWN_KEYS))}", where, fix)
    return tuple(key for key in has if has[key] and (wanted[key] or key == "weight_decay"))


def numbers(entries: dict[str, Any]) -> dict[str, float]:
    """The Python numbers among entries, by key and type: {"step:int": 3}."""
    kinds = {key: next((kind for kind, of in KINDS.items() if isinstance(value, of)), None) for key, value in entries.items()}
    return {f"{key}:{kind}": entries[key] for key, kind in kinds.items() if kind}


def kept(entries: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The live tensors among entries, and its numbers as 0-d float64 tensors of their own; what is neither is left out."""
    tensors = {key: value for key, value in entries.items() if isinstance(value, torch.Tensor)}
    return tensors | {key: torch.tensor(float(value), dtype=torch.float64) for key, value in numbers(entries).items()}


def counters(group: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a user's class counts in a parameter group: numbers that changed since it was made, and tensors of one number."""
    if "made" not in group:
        return {}
    aside, initial = OWN_KEYS.union(group["follow"]), group["made"].initial
    own = {key: value for key, value in group.items() if key not in aside and (not torch.is_tensor(value) or value.numel() == 1)}
    same = {key for key, value in numbers(own).items() if initial.get(key) == value}
    return {key: tensor for key, tensor in kept(own).items() if key not in same}


def put_back(
    entries: dict[str, Any], live: dict[str, torch.Tensor], arrays: dict[str, np.ndarray], device: torch.device, counts_on_host: bool
) -> None:
    """Copies arrays into the `live` ones of entries, makes those that are missing, and removes those that the arrays lack."""
    for key in live.keys() - arrays.keys():
        del entries[name_of(key)]
    for key, array in arrays.items():
        given = torch.tensor(np.asarray(array))
        if name_of(key) != key:
            entries[name_of(key)] = KINDS[key.rpartition(":")[2]](given.item())
        elif key not in live:
            entries[key] = given if key == "step" and counts_on_host else given.to(device)
        elif live[key].shape != given.shape:
            what = f"slot {key} has shape {tuple(given.shape)}, the optimizer's has {tuple(live[key].shape)}"
            raise UserError(what, "state of the optimizer", FIX)
        else:
            live[key].copy_(given)


def name_of(key: str) -> str:
    """The entry that a key of kept() means: "step:int" is step."""
    name, _, kind = key.rpartition(":")
    return name if name and kind in KINDS else key


def rehearse(group: dict[str, Any], p: torch.nn.Parameter, load: Callable[[torch.optim.Optimizer, torch.nn.Parameter], None]) -> None:
    """Raises a UserError where a step from what `load` loads fails, as after another class or other options it may.

    A new optimizer of the same class makes the step, for a copy of `p` with a gradient of zero. Costs the memory of its slots.
    """
    failed = _step(group, p, load)
    if failed and not _step(group, p, lambda *_: None):  # where this one fails too, it says nothing about the state
        what = f"{group['made'].path} cannot go on from these slots: {type(failed).__name__}: {failed}"
        raise UserError(what, "state of the optimizer", FIX) from failed


def _step(
    group: dict[str, Any], p: torch.nn.Parameter, load: Callable[[torch.optim.Optimizer, torch.nn.Parameter], None]
) -> Exception | None:
    """What a first step after `load` raises."""
    copy, made = torch.nn.Parameter(p.detach().clone()), group["made"]
    copy.grad = torch.zeros_like(copy)
    try:
        optimizer = made.make([{key: group[key] for key in OWN_KEYS} | {"params": [copy]}], **made.arguments)
        load(optimizer, copy)
        optimizer.step()
    except Exception as error:
        return error
    return None
