"""The optimizers of the torch framework: a Rule as a torch.optim.Optimizer, or a user's own class, and their slots as arrays by name."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import required

from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.optim.ops import TorchOps, unstack
from hvdtrain.frameworks.torch.optim.user_optimizer import FIX, construct, counters, followed, kept, name_of, put_back, rehearse
from hvdtrain.optim.rule import Rule, is_excluded

Parameters = list[torch.nn.Parameter]
Named = list[tuple[str, torch.nn.Parameter]]

OPS = TorchOps()
GROUP = "group."  # begins a slot that is its parameter group's
MADE_BY = "s.made by "  # no parameter's name has a space
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
        add = torch.optim.Optimizer.add_param_group  # what wraps it imports torch's compiler: half a second of every start
        getattr(add, "__wrapped__", add)(self, param_group)
        group = self.param_groups[-1]
        group["momentum"] = group["rule"].momentum if group["momentum"] is None else group["momentum"]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.grad is not None and not set_to_none:
                p.grad.detach_().zero_()
            else:
                p.grad = None

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
        [group | {"rule": rule.without_trust_ratio() if group["excluded"] else rule, "follow": follow} for group in groups(named, exclude)]
    )


def groups(named: Named, exclude: bool) -> list[dict[str, Any]]:
    """The adapted parameters and the excluded ones; a group of none is left out."""
    out = [exclude and is_excluded(tuple(p.shape)) for _, p in named]
    parts = [
        {"params": [p for (_, p), o in zip(named, out, strict=True) if o == excluded], "excluded": excluded} for excluded in (False, True)
    ]
    return [part for part in parts if part["params"]]


def make_user_optimizer(make: Callable[..., Any], name: str, named: Named, config: Config, provenance: Provenance) -> torch.optim.Optimizer:
    """A torch.optim.Optimizer of any class, made with the options of `optim`; lr and decay follow the recipe, momentum where it is given.

    The class's own default of weight_decay does not count: optim.weight_decay does. A checkpoint holds the tensors and numbers of its
    state, and the numbers of its parameter groups that it changes. All else that it keeps (lists, texts, attributes of itself) is
    dropped, and begins anew where a job is resumed.
    """
    if "lr" in config.optim.options:
        raise UserError("optim.lr is no option: the recipe sets the rate of each step", provenance.where("optim.lr"), "use optim.base_lr")
    parts = groups(named, config.optim.exclude == "norms_and_biases")
    optimizer = construct(make, name, parts, config, provenance.where("optim.name"))
    for group in optimizer.param_groups:
        group["follow"] = followed(group, name, config, provenance)
    return optimizer


def set_hyper(optimizer: torch.optim.Optimizer, hyper: Hyper) -> None:
    """Puts the numbers of one step into every parameter group."""
    for group in optimizer.param_groups:
        for key in group["follow"]:
            value = 0.0 if key == "weight_decay" and group["excluded"] else getattr(hyper, key)
            if key == "momentum" and "momentum" not in group:
                group["betas"] = (value, *group["betas"][1:])
            else:
                group[key] = value


def fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the slots of the first step, so that they can be saved, sent and loaded at any time; a user's class makes its own."""
    if isinstance(optimizer, RuleOptimizer):
        optimizer.fill()


def optimizer_state(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """The live slots of a parameter by key, sorted; what a user's class counts in its group as "group.step:int".

    A Python number is a 0-d float64 tensor of its own, and its key tells its type; what is neither tensor nor number is left out.
    """
    counts = {GROUP + key: count for key, count in counters(group_of(optimizer, p)).items()}
    return dict(sorted((kept(optimizer.state.get(p, {})) | counts).items()))


def group_of(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> dict[str, Any]:
    """The parameter group that p is in."""
    return next(group for group in optimizer.param_groups if any(q is p for q in group["params"]))


def load_optimizer_state(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, arrays: dict[str, np.ndarray]) -> None:
    """Copies arrays into the live slots of a parameter, makes those that are missing, and removes those that the arrays lack.

    Raises a UserError where a user's class cannot go on from them.
    """
    group = group_of(optimizer, p)
    if arrays and "made" in group and arrays.keys() != optimizer_state(optimizer, p).keys():
        rehearse(group, p, lambda other, copy: _load(other, copy, arrays))
    _load(optimizer, p, arrays)


@torch.no_grad()
def _load(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, arrays: dict[str, np.ndarray]) -> None:
    group, state = group_of(optimizer, p), optimizer.state[p]
    counts_on_host = not any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)  # as torch's own do
    own = {key: array for key, array in arrays.items() if not key.startswith(GROUP)}
    put_back(state, kept(state), own, p.device, counts_on_host)
    if "made" in group:
        counts = {key.removeprefix(GROUP): array for key, array in arrays.items() if key.startswith(GROUP)}
        put_back(group, counters(group), counts, p.device, counts_on_host)
        for key, value in group["made"].initial.items():
            group.setdefault(name_of(key), value)


def maker(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An entry of a learner's state that names the user's class, since arrays hold no text; none for a rule."""
    first = optimizer.param_groups[0]
    return {MADE_BY + first["made"].path: torch.zeros(())} if "made" in first else {}


def check_maker(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Raises a UserError where the slots among the names of a state are another class's; a state without slots fits every class."""
    makers = {name if name.startswith(MADE_BY) else "" for name in names if name.startswith("s.")}  # "": of a slot
    theirs, ours = "".join(makers), "".join(maker(optimizer))
    if makers and theirs != ours:
        words = [name.removeprefix(MADE_BY) or "one of the rules" for name in (theirs, ours)]
        raise UserError(f"its optimizer was {words[0]}, this one is {words[1]}", "state of the optimizer", FIX)
