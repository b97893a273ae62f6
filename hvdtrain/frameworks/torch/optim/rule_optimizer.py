"""The optimizers of the torch framework: a Rule as a torch.optim.Optimizer, or a user's class, and
their state as arrays by name."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.optim.optimizer import required

from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import MADE_BY
from hvdtrain.frameworks.torch.optim.user_optimizer import (
    as_tensors,
    construct,
    counters,
    followed,
    keys_of_numbers_of_class,
    load_entries,
    name_of,
    try_step,
)
from hvdtrain.optim.groups import ScaledRule
from hvdtrain.optim.rule import Rule, is_excluded, newton_schulz
from hvdtrain.optim.thawing import Thawed
from hvdtrain.optim.weight_average import Averaged, without_average

Arrays = list[torch.Tensor]  # tensors of one dtype on one device
Row = torch.Tensor  # (n,), one number for each of n parameters


class TorchOps:
    """A rule's arithmetic over lists of tensors. Call it under torch.no_grad(). A Row is never
    copied to the host, so nothing waits for a GPU.

    On a GPU, a Row as a factor takes one kernel for each parameter, while a Python number takes one
    for many.
    """

    keep: Callable[[Row], None] | None = None  # for trust ratios

    def zeros_like(self, x: Arrays) -> Arrays:
        return [torch.zeros_like(t) for t in x]

    def zero(self, x: Arrays) -> Row:
        return torch.zeros(len(x), dtype=x[0].dtype, device=x[0].device)

    def copy(self, x: Arrays) -> Arrays:
        return [t.clone() for t in x]

    def scale(self, a: Row | float, Y: Arrays) -> Arrays:
        if isinstance(a, torch.Tensor):
            torch._foreach_mul_(Y, a.unbind())
        elif a != 1:
            torch._foreach_mul_(Y, a)
        return Y

    def axpy(self, a: Row | float, x: Arrays, Y: Arrays) -> Arrays:
        if isinstance(a, torch.Tensor):
            torch._foreach_addcmul_(Y, x, a.unbind())
        elif a != 0:
            torch._foreach_add_(Y, x, alpha=a)
        return Y

    def addcmul(self, a: float, x: Arrays, z: Arrays, Y: Arrays) -> Arrays:
        torch._foreach_addcmul_(Y, x, z, value=a)
        return Y

    def divide_by_sqrt(self, x: Arrays, v: Arrays, eps: float) -> Arrays:
        below = torch._foreach_sqrt(v)
        torch._foreach_add_(below, eps)
        return list(torch._foreach_div(x, below))

    def norm(self, x: Arrays) -> Row:
        if all(t.device.type == "cpu" and t.is_contiguous() for t in x):
            return torch.stack(
                [torch.dot(t.view(-1), t.view(-1)) for t in x]
            ).sqrt()  # on two cores half the time of vector_norm
        return torch.stack(torch._foreach_norm(x))

    def orthogonalize(self, x: Arrays, p: Arrays, rounds: int, eps: float, dtype: str) -> Arrays:
        # a flattened part of a matrix would give wrong results
        assert all(t.ndim >= 2 for t in x), [tuple(t.shape) for t in x]
        alike: dict[torch.Size, list[int]] = {}
        for i, t in enumerate(x):
            alike.setdefault(t.flatten(1).shape, []).append(i)
        orthogonal = list(x)
        for members in alike.values():
            # (n, out, in kh kw)
            stack = torch.stack([x[i].flatten(1) for i in members]).to(
                getattr(torch, dtype) if dtype else None
            )
            norms = stack.flatten(1).norm(dim=1).view(-1, 1, 1)
            for i, matrix in zip(members, newton_schulz(stack, rounds, eps, norms), strict=True):
                orthogonal[i] = matrix.to(x[i].dtype).reshape(x[i].shape)
        return orthogonal

    def where(self, condition: torch.Tensor, a: Row | float, b: Row | float) -> Row:
        assert isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor), (
            f"{a}, {b}: torch would make their dtype the default one"
        )
        return torch.where(condition, a, b)

    def sqrt(self, a: Row) -> Row:
        return a.sqrt()

    def trusted(self, a: Row) -> Row:
        if self.keep is not None:
            self.keep(a)
        return a


def unstack(entry: Any) -> Arrays:
    """Returns one tensor for each parameter, 0-d if the entry of the state is a Row."""
    return list(entry.unbind()) if isinstance(entry, torch.Tensor) else entry


Parameters = list[torch.nn.Parameter]
NamedParameters = list[tuple[str, torch.nn.Parameter]]

OPS = TorchOps()
GROUP = "group."  # begins a key of state that belongs to the parameter group


class RuleOptimizer(torch.optim.Optimizer):
    """A torch optimizer that applies a rule to many parameters in one call.

    A group holds rule, lr, momentum, weight_decay and step, the number of updates. state[p] holds
    the tensors "0", "1", ... of the rule's state; one number for a parameter is a 0-d tensor. It
    can be constructed again from its groups only, as hvd.DistributedOptimizer does. A parameter
    whose grad is None is skipped, as in torch, but step counts for the whole group.
    """

    ops = OPS
    bytes_of: Callable[[torch.nn.Parameter], int] = staticmethod(
        lambda p: p.numel() * p.element_size()
    )
    run_bytes = (
        8 << 20
        # bytes of parameters that a rule updates in one call on a CPU, so that its temporary
        # tensors stay in the cache
    )

    def __init__(
        self,
        params: Iterable[Any],
        rule: Any = required,
        lr: float = 0.0,
        momentum: float | None = None,
        weight_decay: float = 0.0,
    ) -> None:
        # of the last step, if they are kept: parameters, and (n,) factors of their learning rates
        self.trust_ratios: list[tuple[Parameters, Row]] = []
        super().__init__(
            params,
            {"rule": rule, "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "step": 0},
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # its wrapper imports torch's compiler, which takes half a second at every start
        add = torch.optim.Optimizer.add_param_group
        getattr(add, "__wrapped__", add)(self, param_group)
        group = self.param_groups[-1]
        group["momentum"] = (
            group["rule"].momentum if group["momentum"] is None else group["momentum"]
        )

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
        self.trust_ratios.clear()
        for group in self.param_groups:
            hyper = Hyper(
                float(group["lr"]),
                float(group["momentum"]),
                float(group["weight_decay"]),
                batch=0,
                step=int(group["step"]),
            )
            for parameters in runs(
                [p for p in group["params"] if p.grad is not None], self.run_bytes, self.bytes_of
            ):
                self._update(group["rule"], rows(group["rule"]), parameters, hyper)
            group["step"] += 1
        return loss

    def keep_trust_ratios(self) -> None:
        """Keeps those of each step in `trust_ratios` until the next step."""
        self.ops = copy.copy(self.ops)
        self.ops.keep = lambda ratios: self.trust_ratios.append((self._updated, ratios))

    @torch.no_grad()
    def fill(self) -> None:
        """Creates the state of every parameter that has none."""
        for group in self.param_groups:
            for p in group["params"]:
                self._fill(group["rule"], p)

    def _fill(self, rule: Rule, p: torch.nn.Parameter) -> None:
        if "0" not in self.state[p]:
            self.state[p] |= {
                str(i): unstack(entry)[0] for i, entry in enumerate(rule.init([p], self.ops))
            }

    def _update(
        self, rule: Rule, in_rows: tuple[bool, ...], parameters: Parameters, hyper: Hyper
    ) -> None:
        gradients = [dense(p) for p in parameters]
        for p in parameters:
            self._fill(rule, p)
        state = [[self.state[p][str(i)] for p in parameters] for i in range(len(in_rows))]
        stacked = tuple(
            torch.stack(entry) if is_row else entry
            for entry, is_row in zip(state, in_rows, strict=True)
        )
        self._updated = parameters
        new_parameters, new_state = rule.update(gradients, stacked, parameters, hyper, self.ops)
        for old, new in zip([parameters, *state], [new_parameters, *new_state], strict=True):
            if new is not old:
                torch._foreach_copy_(old, unstack(new))


@functools.cache
def rows(rule: Any) -> tuple[bool, ...]:
    """Returns which entries of a rule's state are one number for each parameter."""
    return tuple(isinstance(entry, torch.Tensor) for entry in rule.init([torch.zeros(1)], OPS))


def runs(
    parameters: Parameters, run_bytes: int, bytes_of: Callable[[torch.nn.Parameter], int]
) -> Iterator[Parameters]:
    """Groups parameters of one dtype and device for one call of a rule: all of them on a GPU, about
    `run_bytes` on a CPU.

    bytes_of: the bytes of a shard's whole parameter, so that every rank forms the same groups.
    """
    alike: dict[tuple[torch.dtype, torch.device], Parameters] = {}
    for p in parameters:
        alike.setdefault((p.dtype, p.device), []).append(p)
    for (_, device), members in alike.items():
        if device.type != "cpu":
            yield members
        else:
            ends = itertools.accumulate(bytes_of(p) for p in members)
            for _, run in itertools.groupby(
                zip(ends, members, strict=True), lambda pair: pair[0] // run_bytes
            ):
                yield [p for _, p in run]


def dense(p: torch.nn.Parameter) -> torch.Tensor:
    """Returns the gradient of a parameter. Raises UserError for a sparse gradient."""
    assert p.grad is not None, tuple(p.shape)
    if p.grad.layout != torch.strided:
        fix = (
            "build the model without it (nn.Embedding: sparse=False), or "
            "optim.name=torch.optim.SparseAdam"
        )
        raise UserError(
            f"a parameter of shape {tuple(p.shape)} has a sparse gradient, which no optimizer "
            "rule supports",
            "optim.name",
            fix,
        )
    return p.grad


def make_optimizer(rule: Rule, named: NamedParameters, exclude: bool) -> torch.optim.Optimizer:
    """Creates the optimizer of a rule; with `exclude`, norms and biases neither decay nor adapt."""
    follow = ("lr", "momentum", "weight_decay", "step")
    found: dict[tuple[bool, Rule], Parameters] = {}
    for name, p in named:
        excluded = exclude and is_excluded(tuple(p.shape))
        found.setdefault((excluded, rule.of_parameter(name, tuple(p.shape), excluded)), []).append(
            p
        )
    return RuleOptimizer(
        [
            {"params": found[key], "excluded": key[0], "rule": key[1], "follow": follow}
            for key in sorted(
                found, key=lambda key: key[0]
            )  # the adapted parameters first, whatever the order of the model's
        ]
    )


def groups(named: NamedParameters, exclude: bool) -> list[dict[str, Any]]:
    """Returns the groups of adapted and of excluded parameters, without empty groups."""
    found: list[dict[str, Any]] = [
        {"params": [], "excluded": False},
        {"params": [], "excluded": True},
    ]
    for _, p in named:
        found[exclude and is_excluded(tuple(p.shape))]["params"].append(p)
    return [group for group in found if group["params"]]


def make_user_optimizer(
    constructor: Callable[..., Any], name: str, named: NamedParameters, config: Config
) -> torch.optim.Optimizer:
    """Creates a torch.optim.Optimizer of any class from the options of `optim`. lr follows the
    recipe, and so do decay and momentum if they are set.

    Without optim.weight_decay the class's default applies to every parameter, as in torch. A
    checkpoint contains the tensors and numbers of its state, and the numbers in its parameter
    groups that it changes, also in tuples and lists. Anything else, such as strings and attributes,
    is not saved, and is initial again in a resumed job. Raises UserError if the class or its
    options are not supported.
    """
    optimizer = construct(
        constructor,
        name,
        groups(named, config.optim.exclude == "norms_and_biases"),
        config,
        config.where("optim.name"),
    )
    for group in optimizer.param_groups:
        group["follow"] = followed(group, name, config)
    return optimizer


def set_hyper(optimizer: torch.optim.Optimizer, hyper: Hyper) -> None:
    """Sets the hyperparameters of one step in every parameter group."""
    for group in optimizer.param_groups:
        for key in group["follow"]:
            value = 0.0 if key == "weight_decay" and group["excluded"] else getattr(hyper, key)
            if key == "step" and isinstance(group.get("rule"), Thawed):
                value -= hyper.thaw[group["rule"].entry]
            if key == "lr" and "construction" in group:
                value *= group["construction"].rate
            if key == "momentum" and "momentum" not in group:
                group["betas"] = (value, *group["betas"][1:])
            else:
                group[key] = value


def fill_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Creates the initial state, so that it can be saved, broadcast and loaded at any time; a
    user's class creates its own."""
    if isinstance(optimizer, RuleOptimizer):
        optimizer.fill()


def optimizer_state(
    optimizer: torch.optim.Optimizer, p: torch.nn.Parameter
) -> dict[str, torch.Tensor]:
    """Returns the live state of a parameter by sorted key; counters that a user's class keeps in
    its group are "group.step:int".

    A Python number becomes a new 0-d float64 tensor, and its key ends with its type; anything else
    is omitted.
    """
    if isinstance(
        optimizer, RuleOptimizer
    ):  # a copy of the state at every sync point needs it for every parameter
        return dict(sorted(optimizer.state.get(p, {}).items()))
    counts = {GROUP + key: count for key, count in counters(group_of(optimizer, p)).items()}
    return dict(sorted((as_tensors(optimizer.state.get(p, {})) | counts).items()))


def keys_of_numbers(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> set[str]:
    """Returns the keys of the state with one number per parameter, which shapes do not reveal for a
    0-d parameter."""
    group = group_of(optimizer, p)
    if "construction" not in group:
        return {key for key, tensor in optimizer_state(optimizer, p).items() if not tensor.ndim}
    return keys_of_numbers_of_class(group, p)


def has_averages(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer keeps averages of weights."""
    return any(isinstance(group.get("rule"), Averaged) for group in optimizer.param_groups)


def average(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> torch.Tensor:
    """Returns the average of optim.ema; before the first step, the weights."""
    state = optimizer_state(optimizer, p)
    last = len(state) - 1
    return state[f"{last - 1}"] if state[f"{last}"] > 0 else p.detach()


def group_of(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter) -> dict[str, Any]:
    """Returns the parameter group of p. A checkpoint needs it for each parameter."""
    place = _places.get(optimizer, {}).get(id(p))
    if place is None or not _is_at(optimizer, p, place):
        _places[optimizer] = {
            id(q): Place(i, j)
            for i, group in enumerate(optimizer.param_groups)
            for j, q in enumerate(group["params"])
        }
        place = _places[optimizer][id(p)]
    return optimizer.param_groups[place.group]


class Place(NamedTuple):
    """The position of a parameter in an optimizer."""

    group: int
    position: int  # in it


# cache of group_of() by id() of parameters; code that changes groups need not know about it
_places: WeakKeyDictionary[torch.optim.Optimizer, dict[int, Place]] = WeakKeyDictionary()


def _is_at(optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, place: Place) -> bool:
    if place.group >= len(optimizer.param_groups):
        return False
    parameters = optimizer.param_groups[place.group]["params"]
    return place.position < len(parameters) and parameters[place.position] is p


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, arrays: dict[str, np.ndarray]
) -> None:
    """Copies arrays into the live state of a parameter, adds missing entries, and removes entries
    that the arrays lack.

    Raises UserError if a user's class cannot continue from them.
    """
    group = group_of(optimizer, p)
    if arrays and "construction" in group and arrays.keys() != optimizer_state(optimizer, p).keys():
        try_step(group, p, lambda other, copy: _load(other, copy, arrays))
    _load(optimizer, p, arrays)


@torch.no_grad()
def _load(
    optimizer: torch.optim.Optimizer, p: torch.nn.Parameter, arrays: dict[str, np.ndarray]
) -> None:
    group = group_of(optimizer, p)
    state = optimizer.state[p]
    # as in torch's optimizers
    counts_on_host = not any(
        group.get("fused") or group.get("capturable") for group in optimizer.param_groups
    )
    own = {key: array for key, array in arrays.items() if not key.startswith(GROUP)}
    load_entries(state, as_tensors(state), own, p.device, counts_on_host)
    if "construction" in group:
        counts = {
            key.removeprefix(GROUP): array for key, array in arrays.items() if key.startswith(GROUP)
        }
        load_entries(group, counters(group), counts, p.device, counts_on_host)
        for key, value in group["construction"].initial.items():
            group.setdefault(name_of(key), copy.copy(value))


def class_entry(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Returns a state entry whose name contains the user's class, because arrays cannot store
    strings; none for a rule."""
    first = optimizer.param_groups[0]
    return (
        {MADE_BY + first["construction"].path: torch.zeros(())} if "construction" in first else {}
    )


def check_class(optimizer: torch.optim.Optimizer, names: Iterable[str]) -> None:
    """Raises UserError if the optimizer state among the names of a state belongs to another class;
    a state without optimizer state matches every class."""
    # "": not an entry of class_entry()
    classes = {name if name.startswith(MADE_BY) else "" for name in names if name.startswith("s.")}
    theirs = "".join(classes)
    ours = "".join(class_entry(optimizer))
    if classes and theirs != ours:
        there = _public_name(theirs) if theirs else "one of hvdtrain's own optimizers"
        rule = (
            without_average(optimizer.param_groups[0]["rule"])
            if "rule" in optimizer.param_groups[0]
            else None
        )
        rule = rule.rule if isinstance(rule, Thawed) else rule
        own = rule.rule if isinstance(rule, ScaledRule) else rule
        here = _public_name(ours) if ours else type(own).__module__.rpartition(".")[2]
        fix = f"optim.name={there}" if theirs else "the optim.name of its run folder's config.yaml"
        raise UserError(
            f"the checkpoint was written with {there}, but this job has optim.name={here}",
            "state of the optimizer",
            fix,
        )


def _public_name(entry: str) -> str:
    """Returns the public name of a torch class, such as torch.optim.RMSprop; for other classes the
    full path."""
    path = entry.removeprefix(MADE_BY)
    name = path.rpartition(".")[2]
    return (
        f"torch.optim.{name}"
        if path.startswith("torch.optim.") and hasattr(torch.optim, name)
        else path
    )
