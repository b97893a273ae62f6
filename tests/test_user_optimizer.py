"""A user's own class of torch.optim: what follows the recipe; and the slots of every optimizer: saved, loaded, and wrapped by Horovod."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from ranks import needs_horovod, needs_mpirun
from test_torch_optimizer import RULES, SHAPES, assert_equal, named, parameters, set_gradients, walk
from torch.nn import Parameter

from hvdtrain.configure import configure
from hvdtrain.errors import UserError
from hvdtrain.frames.torch_optimizer import fill_slots, load_slots, make_optimizer, make_user_optimizer, set_hyper, slots
from hvdtrain.state import Hyper


def user(make: Callable[..., Any], some: list[Parameter], *words: str) -> torch.optim.Optimizer:
    config, origins = configure(None, ["optim.name=its.Name", *words])
    return make_user_optimizer(make, "its.Name", named(some), config, origins)


class Counting(torch.optim.Optimizer):
    """Moves by lr, and keeps what torch's own do not: a Python number, and a text."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad.sign()
                self.state[p] = {"z": torch.ones(2), "count": self.state[p].get("count", 0) + 1, "note": "text"}


def test_options_and_numbers_reach_a_users_class() -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    words = ["optim.alpha=0.9", "optim.eps=1e-3", "optim.centered=true", "optim.momentum=0.5", "optim.weight_decay=0.01"]
    optimizer = user(torch.optim.RMSprop, ours, *words)
    walk(optimizer, ours, range(4))
    groups = [
        {"params": theirs[0::2], "weight_decay": 0.01},
        {"params": theirs[1::2], "weight_decay": 0.0},
    ]  # SHAPES: a weight, a bias, ...
    direct = torch.optim.RMSprop(groups, alpha=0.9, eps=1e-3, centered=True)
    for step in range(4):
        for group in direct.param_groups:
            group["lr"], group["momentum"] = 0.1 / (1 + step), 0.8
        set_gradients(theirs, step)
        direct.step()
    assert_equal(ours, theirs)


def test_which_numbers_follow_the_recipe() -> None:
    some, h = parameters(*SHAPES), Hyper(0.3, 0.7, 0.02, batch=1, step=9)

    def groups(make: Callable[..., Any], *words: str) -> list[dict[str, Any]]:
        optimizer = user(make, some, *words)
        set_hyper(optimizer, h)
        return optimizer.param_groups

    weights, biases = groups(torch.optim.RMSprop)
    assert (weights["lr"], weights["momentum"], weights["weight_decay"], biases["weight_decay"]) == (0.3, 0, 0.02, 0.0)
    assert groups(torch.optim.RMSprop, "optim.momentum=0.5")[1]["momentum"] == 0.7
    assert groups(torch.optim.AdamW, "optim.betas=[0.8,0.99]")[0]["betas"] == (0.8, 0.99)
    assert groups(torch.optim.AdamW, "optim.betas=[0.8,0.99]", "optim.momentum=0.5")[0]["betas"] == (0.7, 0.99)
    assert groups(Counting)[0]["lr"] == 0.3 and "weight_decay" not in groups(Counting)[0]
    (together,) = groups(torch.optim.AdamW, "optim.exclude=none")
    assert len(together["params"]) == 4 and together["weight_decay"] == 0.02


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"pace": 1.0})

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "words", "what", "where", "fix"),
    [
        (torch.optim.Adam, ["optim.lr=0.1"], "optim.lr is no option", "optim.lr, command line", "use optim.base_lr"),
        (torch.optim.Adam, ["optim.alpha=1"], "got an unexpected keyword argument 'alpha'", "optim.name", "optim.<name>=<value>"),
        (torch.optim.Adam, ["optim.alpha=1"], "its.Name(params: ", "optim.name", "optim.<name>=<value>"),
        (torch.optim.Adam, ["optim.eps=-1"], "does not fit: Invalid epsilon value: -1", "optim.name", "optim.<name>=<value>"),
        (torch.optim.LBFGS, [], "wants a closure", "optim.name", "one gradient a step"),
        (torch.nn.Linear, [], "its.Name(in_features: int, ", "optim.name", "torch.optim.RMSprop"),
        (torch.nn.Linear, [], "is no class of torch.optim.Optimizer", "optim.name", "torch.optim.RMSprop"),
        (torch.add, [], "its.Name(...) is no class of torch.optim.Optimizer", "optim.name", "torch.optim.RMSprop"),
        (NoRate, [], "its.Name has no lr; it has pace", "optim.name", "give another class"),
        (Counting, ["optim.weight_decay=1"], "has no weight_decay; it has lr", "optim.weight_decay, command line", "leave optim"),
        (torch.optim.Adagrad, ["optim.momentum=0.9"], "has no momentum; it has ", "optim.momentum, command line", "leave optim"),
    ],
)  # fmt: skip
def test_what_a_users_class_cannot_do_is_told(make: Any, words: list[str], what: str, where: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        user(make, parameters(*SHAPES), *words)
    assert what in caught.value.what and caught.value.where.startswith(where) and fix in caught.value.fix


MAKERS = [
    *(lambda some, rule=rule: make_optimizer(rule, named(some), True) for rule in RULES),
    *(
        lambda some, make=make: user(make, some)
        for make in (torch.optim.RMSprop, torch.optim.Adam, torch.optim.ASGD, torch.optim.Adafactor, torch.optim.Adagrad, Counting)
    ),
]


@pytest.mark.parametrize("make", MAKERS)
def test_saved_slots_go_on_where_they_were_taken(make: Callable[[list[Parameter]], torch.optim.Optimizer]) -> None:
    one, other = parameters(*SHAPES), parameters(*SHAPES)
    a, b = make(one), make(other)
    walk(a, one, range(3))
    fill_slots(b)
    for p, q in zip(one, other, strict=True):
        q.data.copy_(p.data)
        arrays = {key: slot.numpy().copy() for key, slot in slots(a, p).items()}
        assert arrays and list(arrays) == sorted(arrays)
        load_slots(b, q, arrays)
        loaded = slots(b, q)
        assert {key: (slot.dtype, slot.shape) for key, slot in loaded.items()} == {
            key: (slot.dtype, slot.shape) for key, slot in slots(a, p).items()
        }
    for optimizer, some in ((a, one), (b, other)):
        walk(optimizer, some, range(3, 6))
    assert_equal(one, other)


@pytest.mark.parametrize("rule", RULES)
def test_filled_slots_give_the_same_first_step(rule: Any) -> None:
    one, other = parameters(*SHAPES), parameters(*SHAPES)
    a, b = make_optimizer(rule, named(one), True), make_optimizer(rule, named(other), True)
    assert slots(a, one[0]) == {} and one[0] not in a.state
    fill_slots(a)
    shapes = [tuple(slot.shape) for slot in slots(a, one[0]).values()]
    assert shapes == {"Sgd": [(3, 4)], "Larc": [(3, 4)], "Adam": [(3, 4), (3, 4)], "NovoGrad": [(3, 4), ()]}[type(rule).__name__]
    assert all(not slot.any() for p in one for slot in slots(a, p).values())
    walk(a, one, range(2))
    walk(b, other, range(2))
    assert_equal(one, other)


def test_slots_that_are_no_tensors_and_slots_that_go() -> None:
    some = parameters((2,))
    optimizer = user(Counting, some)
    walk(optimizer, some, range(3))
    live = slots(optimizer, some[0])
    assert list(live) == ["count", "z"] and (live["count"].item(), live["count"].dtype) == (3.0, torch.float64)
    kept = optimizer.state[some[0]]["z"]
    load_slots(optimizer, some[0], {"count": np.array(7.0), "z": np.array([4.0, 5.0], np.float32)})
    assert optimizer.state[some[0]]["count"] == 7 and type(optimizer.state[some[0]]["count"]) is int
    assert optimizer.state[some[0]]["z"] is kept and kept.tolist() == [4.0, 5.0]
    with pytest.raises(UserError) as caught:
        load_slots(optimizer, some[0], {"z": np.ones(3)})
    assert caught.value.what == "slot z has shape (3,), the optimizer's has (2,)"
    assert "options that the checkpoint was made with" in caught.value.fix
    load_slots(optimizer, some[0], {})
    assert slots(optimizer, some[0]) == {}


ON_RANKS = """
import json, sys
import torch, horovod.torch as hvd
from hvdtrain.configure import configure
from hvdtrain.frames import torch_optimizer as o, torch_reduce
from hvdtrain.optim import larc, novograd
from hvdtrain.state import Hyper

def walk(name, ranks, wrapped):
    shapes = ((3, 4), (5,), (2, 3, 2))
    some = [torch.nn.Parameter(torch.linspace(-1, 2, 60, dtype=torch.float64)[: torch.Size(s).numel()].view(s)) for s in shapes]
    named = [(str(i), p) for i, p in enumerate(some)]
    if name == "rmsprop":
        made = o.make_user_optimizer(torch.optim.RMSprop, name, named, *configure(None, ["optim.momentum=0.9", "optim.alpha=0.8"]))
    else:
        made = o.make_optimizer({"larc": larc, "novograd": novograd}[name].build(), named, True)
    made = torch_reduce.wrap_optimizer(made, named) if wrapped else made
    o.fill_slots(made)
    for step in range(6):
        o.set_hyper(made, Hyper(0.1 / (step + 1), 0.8, 0.01, batch=1, step=step))
        made.zero_grad()
        sum((p * torch.arange(p.numel()).view(p.shape) * (1 + step + 2.5 * rank)).cos().sum() for p in some for rank in ranks).backward()
        made.step()
    return torch.cat([*(p.flatten() for p in some), *(s.flatten() for p in some for s in o.slots(made, p).values())]).tolist()

hvd.init()
names = "larc", "novograd", "rmsprop"
own = {name: [walk(name, [hvd.rank()], True), walk(name, range(hvd.size()), False)] for name in names}
every = hvd.allgather_object(own)
if hvd.rank() == 0:
    json.dump(every, open(sys.argv[1], "w"))
"""


@needs_mpirun
@needs_horovod
def test_horovod_sums_the_gradients_of_two_ranks(tmp_path: Any) -> None:
    out = tmp_path / "out.json"
    result = ranks.mpirun(2, ["-c", ON_RANKS, str(out)])
    assert result.returncode == 0, result.stderr
    for own in json.loads(out.read_text()):  # of each rank
        for name, (wrapped, alone) in own.items():
            np.testing.assert_allclose(wrapped, alone, rtol=1e-12, atol=1e-14, err_msg=name)
