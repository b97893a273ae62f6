"""The optimizers of the torch frame: a Rule as a torch.optim.Optimizer, or a user's own class, and their slots as arrays by name."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import required

from hvdtrain.config import Config
from hvdtrain.configure import Origins
from hvdtrain.errors import UserError
from hvdtrain.frames.torch_ops import TorchOps, unstack
from hvdtrain.optim.rule import Rule, is_excluded
from hvdtrain.state import Hyper

Parameters = list[torch.nn.Parameter]
Named = list[tuple[str, torch.nn.Parameter]]

OPS = TorchOps()
OWN_KEYS = {"params", "excluded", "follow"}  # of a user's parameter groups
RUN_BYTES = 8 << 20  # of parameters that a rule updates in one call on a CPU: what it makes on the way is small and stays in the cache


class RuleOptimizer(torch.optim.Optimizer):
    """What `rule` says, for many parameters in one call.

    A group holds rule, lr, momentum, weight_decay and step, the updates done; state[p] the rule's slots "0", "1", ..., one number for
    a parameter as a 0-d tensor. Its groups alone make it anew: hvd.DistributedOptimizer does that. A parameter whose grad is None
    is left out, as torch does, but step counts for the whole group.
    """

    def __init__(
        self, params: Iterable[Any], rule: Any = required, lr: float = 0.0, momentum: float | None = None, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"rule": rule, "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "step": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["momentum"] = group["rule"].momentum if group["momentum"] is None else group["momentum"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            hyper = Hyper(float(group["lr"]), float(group["momentum"]), float(group["weight_decay"]), batch=0, step=int(group["step"]))
            for parameters in runs([p for p in group["params"] if p.grad is not None]):
                self._update(group["rule"], rows(group["rule"]), parameters, hyper)
            group["step"] += 1
        return loss

    @torch.no_grad()
    def fill(self) -> None:
        """Makes the slots of every parameter that has none."""
        for group in self.param_groups:
            for p in group["params"]:
                self._fill(group["rule"], p)

    def _fill(self, rule: Rule, p: torch.nn.Parameter) -> None:
        if "0" not in self.state[p]:
            self.state[p] |= {str(i): unstack(slot)[0] for i, slot in enumerate(rule.init([p], OPS))}

    def _update(self, rule: Rule, in_rows: tuple[bool, ...], parameters: Parameters, hyper: Hyper) -> None:
        gradients = [dense(p) for p in parameters]
        for p in parameters:
            self._fill(rule, p)
        live = [[self.state[p][str(i)] for p in parameters] for i in range(len(in_rows))]
        stacked = tuple(torch.stack(slot) if row else slot for slot, row in zip(live, in_rows, strict=True))
        moved, after = rule.update(gradients, stacked, parameters, hyper, OPS)
        for old, new in zip([parameters, *live], [moved, *after], strict=True):
            if new is not old:
                torch._foreach_copy_(old, unstack(new))


@functools.cache
def rows(rule: Any) -> tuple[bool, ...]:
    """Which slots of a rule, a hashable one, are one number for each parameter."""
    return tuple(isinstance(slot, torch.Tensor) for slot in rule.init([torch.zeros(1)], OPS))


def runs(parameters: Parameters) -> Iterator[Parameters]:
    """Parameters of one dtype on one device, for one call of a rule: on a GPU all, on a CPU about RUN_BYTES."""
    alike: dict[Any, Parameters] = {}
    for p in parameters:
        alike.setdefault((p.dtype, p.device), []).append(p)
    for some in alike.values():
        if some[0].device.type != "cpu":
            yield some
        else:
            ends = itertools.accumulate(p.numel() * p.element_size() for p in some)
            for _, run in itertools.groupby(zip(ends, some, strict=True), lambda pair: pair[0] // RUN_BYTES):
                yield [p for _, p in run]


def dense(p: torch.nn.Parameter) -> torch.Tensor:
    """The gradient of a parameter."""
    assert p.grad is not None, tuple(p.shape)
    if p.grad.layout != torch.strided:
        fix = "build the model without it (nn.Embedding: sparse=False), or optim.name=torch.optim.SparseAdam"
        raise UserError(f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which no rule takes", "optim.name", fix)
    return p.grad


def make_optimizer(rule: Rule, named: Named, exclude: bool) -> torch.optim.Optimizer:
    """The optimizer that computes what `rule` says; where `exclude`, norms and biases neither decay nor adapt."""
    follow = ("lr", "momentum", "weight_decay", "step")
    return RuleOptimizer(
        [group | {"rule": rule.unadapted() if group["excluded"] else rule, "follow": follow} for group in groups(named, exclude)]
    )


def groups(named: Named, exclude: bool) -> list[dict[str, Any]]:
    """The adapted parameters and the excluded ones; a group of none is left out."""
    out = [exclude and is_excluded(tuple(p.shape)) for _, p in named]
    parts = [
        {"params": [p for (_, p), o in zip(named, out, strict=True) if o == excluded], "excluded": excluded} for excluded in (False, True)
    ]
    return [part for part in parts if part["params"]]


def make_user_optimizer(make: Callable[..., Any], name: str, named: Named, config: Config, origins: Origins) -> torch.optim.Optimizer:
    """A torch.optim.Optimizer of any class, made with the options of `optim`; lr and decay follow the recipe, momentum where it is given.

    The class's own default of weight_decay does not count: optim.weight_decay does.
    """
    if "lr" in config.optim.options:
        raise UserError("optim.lr is no option: the recipe sets the rate of each step", origins.where("optim.lr"), "use optim.base_lr")
    parts = groups(named, config.optim.exclude == "norms_and_biases")
    optimizer = construct(make, name, parts, config, origins.where("optim.name"))
    for group in optimizer.param_groups:
        group["follow"] = followed(group, name, config, origins)
    return optimizer


def construct(make: Callable[..., Any], name: str, parts: list[dict[str, Any]], config: Config, where: str) -> torch.optim.Optimizer:
    """What the class makes of groups and options, or a UserError that tells its signature."""
    signature = inspect.signature(make) if inspect.isclass(make) else "(...)"
    if isinstance(signature, str) or not issubclass(make, torch.optim.Optimizer):  # type: ignore[arg-type]
        raise UserError(f"{name}{signature} is no class of torch.optim.Optimizer", where, "give one, as in optim.name=torch.optim.RMSprop")
    if any(argument.default is argument.empty for argument in list(inspect.signature(make.step).parameters.values())[1:]):  # type: ignore[attr-defined]
        raise UserError(
            f"{name} wants a closure to compute the loss again within a step", where, "give an optimizer of one gradient a step"
        )
    rate = {"lr": config.optim.base_lr} if "lr" in signature.parameters else {}
    try:
        signature.bind(parts, **rate, **config.optim.options)
        optimizer: torch.optim.Optimizer = make(parts, **rate, **config.optim.options)
    except (TypeError, ValueError) as error:  # ValueError: what torch says of a number that makes no sense
        raise UserError(f"{name}{signature} does not fit: {error}", where, "give its parameters as optim.<name>=<value>") from error
    return optimizer


def followed(group: dict[str, Any], name: str, config: Config, origins: Origins) -> tuple[str, ...]:
    """The fields of Hyper that a group of a user's class takes."""
    has = {"lr": "lr" in group, "weight_decay": "weight_decay" in group, "momentum": not {"momentum", "betas"}.isdisjoint(group)}
    wanted = {"lr": True, "weight_decay": config.optim.weight_decay > 0, "momentum": config.optim.momentum is not None}
    for key, want in wanted.items():
        if want and not has[key]:
            where = origins.where("optim.name" if key == "lr" else f"optim.{key}")
            fix = "give another class" if key == "lr" else f"leave optim.{key} out, or give another class"
            raise UserError(f"{name} has no {key}; it has {', '.join(sorted(group.keys() - OWN_KEYS))}", where, fix)
    return tuple(key for key in has if has[key] and (wanted[key] or key == "weight_decay"))


def set_hyper(optimizer: torch.optim.Optimizer, hyper: Hyper) -> None:
    """Puts the numbers of one step into every parameter group."""
    for group in optimizer.param_groups:
        for key in group["follow"]:
            value = 0.0 if key == "weight_decay" and group["excluded"] else getattr(hyper, key)
            if key == "momentum" and "momentum" not in group:
                group["betas"] = (value, *group["betas"][1:])
            else:
                group[key] = value


def fill_slots(optimizer: torch.optim.Optimizer) -> None:
    """Makes the slots of the first step, so that they can be saved, sent and loaded at any time; a user's class makes its own."""
    if isinstance(optimizer, RuleOptimizer):
        optimizer.fill()


def slots(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """The live slots of a parameter by key, sorted; a Python number as a 0-d float64 tensor of its own; what is neither is left out."""
    state = sorted(optimizer.state.get(p, {}).items())
    numbers = {key: torch.tensor(value, dtype=torch.float64) for key, value in state if isinstance(value, (int, float))}
    return {key: numbers.get(key, value) for key, value in state if key in numbers or isinstance(value, torch.Tensor)}


@torch.no_grad()
def load_slots(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, arrays: dict[str, np.ndarray]) -> None:
    """Copies arrays into the live slots of a parameter, makes those that are missing, and removes those that the arrays lack."""
    state, live = optimizer.state[p], slots(optimizer, p)
    counts_on_host = not any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)  # as torch's own do
    for key in live.keys() - arrays.keys():
        del state[key]
    for key, array in arrays.items():
        given = torch.tensor(np.asarray(array))
        if key not in live:
            state[key] = given if key == "step" and counts_on_host else given.to(p.device)
        elif live[key].shape != given.shape:
            what = f"slot {key} has shape {tuple(given.shape)}, the optimizer's has {tuple(live[key].shape)}"
            raise UserError(what, "state of the optimizer", "give the optimizer and options that the checkpoint was made with")
        elif isinstance(state[key], torch.Tensor):
            state[key].copy_(given)
        else:
            state[key] = type(state[key])(given.item())
