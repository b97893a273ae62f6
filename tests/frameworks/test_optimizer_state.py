"""The state of every optimizer of the torch framework: saved, loaded, refused by another
optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from test_learners import batch, hyper, learner
from test_rule_optimizer import RULES, SHAPES, assert_equal, named, parameters, walk
from test_user_optimizer import Counting, user
from torch.nn import Parameter

from hvdtrain.core.arrays import digest
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.optim.rule_optimizer import (
    fill_optimizer_state,
    group_of,
    load_optimizer_state,
    make_optimizer,
    optimizer_state,
)


class CountedList(list[Parameter]):
    """Counts what is read of it."""

    read = 0

    def __iter__(self) -> Any:
        for each in super().__iter__():
            CountedList.read += 1
            yield each

    def __getitem__(self, index: Any) -> Any:
        CountedList.read += 1
        return super().__getitem__(index)


def test_the_groups_of_many_parameters_are_found_in_few_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A checkpoint asks for each: 8 million looks at 4,000 parameters."""
    monkeypatch.setattr(CountedList, "read", 0)
    parameters = [Parameter(torch.zeros(1)) for _ in range(400)]
    optimizer = torch.optim.SGD([{"params": parameters[:300]}, {"params": parameters[300:]}], 0.1)
    for group in optimizer.param_groups:
        group["params"] = CountedList(group["params"])
    for _ in range(2):
        groups = [group_of(optimizer, p) for p in parameters]
        assert all(group is optimizer.param_groups[0] for group in groups[:300])
        assert all(group is optimizer.param_groups[1] for group in groups[300:])
    assert CountedList.read < 4 * 400
    # groups may change at any time
    moved = optimizer.param_groups[0]["params"].pop(0)
    optimizer.param_groups[1]["params"].append(moved)
    assert group_of(optimizer, moved) is optimizer.param_groups[1]
    assert group_of(optimizer, parameters[1]) is optimizer.param_groups[0]
    added = Parameter(torch.zeros(1))
    optimizer.add_param_group({"params": [added]})
    assert group_of(optimizer, added) is optimizer.param_groups[2]
    del optimizer.param_groups[2]
    with pytest.raises(KeyError):
        group_of(optimizer, added)


class CountsInGroups(torch.optim.Optimizer):
    """Lets its rate fall by numbers of several types, all of them in its groups or as Python
    numbers in its state."""

    def __init__(self, params: Any, lr: float = 1.0, eps: float = 0.5, calls: int = 0) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "calls": calls})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            group["odd"], group["sum"] = (
                not group.get("odd", False),
                group.get("sum", torch.zeros(1)) + group["calls"],
            )
            for p in group["params"]:
                state = self.state[p]
                assert type(state.get("odd", True)) is bool and type(state.get("seen", 0)) is int
                state["odd"], state["seen"] = group["odd"], state.get("seen", 0) + 1
                p.data -= (
                    group["lr"]
                    * p.grad
                    / (group["eps"] + group["sum"].item() + state["seen"] + 3 * state["odd"])
                )


BY_GROUP = CountsInGroups, pytorch_optimizer.AdaBelief, pytorch_optimizer.Prodigy


MAKERS = [
    *(lambda some, rule=rule: make_optimizer(rule, named(some), True) for rule in RULES),
    *(
        lambda some, make=make: user(make, some)
        for make in (
            torch.optim.RMSprop,
            torch.optim.Adam,
            torch.optim.ASGD,
            torch.optim.Adafactor,
            torch.optim.Adagrad,
            Counting,
            *BY_GROUP,
        )
    ),
]


@pytest.mark.parametrize("make", MAKERS)
def test_saved_state_continues_where_it_was_taken(
    make: Callable[[list[Parameter]], torch.optim.Optimizer],
) -> None:
    one, other = parameters(*SHAPES), parameters(*SHAPES)
    a = make(one)
    b = make(other)
    walk(a, one, range(3))
    fill_optimizer_state(b)
    for p, q in zip(one, other, strict=True):
        q.data.copy_(p.data)
        arrays = {key: tensor.numpy().copy() for key, tensor in optimizer_state(a, p).items()}
        assert arrays and list(arrays) == sorted(arrays)
        load_optimizer_state(b, q, arrays)
        loaded = optimizer_state(b, q)
        assert {key: (tensor.dtype, tensor.shape) for key, tensor in loaded.items()} == {
            key: (tensor.dtype, tensor.shape) for key, tensor in optimizer_state(a, p).items()
        }
    for optimizer, some in ((a, one), (b, other)):
        walk(optimizer, some, range(3, 6))
    assert_equal(one, other)


@pytest.mark.parametrize("rule", RULES)
def test_state_that_was_made_ahead_gives_the_same_first_step(rule: Any) -> None:
    one, other = parameters(*SHAPES), parameters(*SHAPES)
    a = make_optimizer(rule, named(one), True)
    b = make_optimizer(rule, named(other), True)
    assert optimizer_state(a, one[0]) == {} and one[0] not in a.state
    fill_optimizer_state(a)
    shapes = [tuple(tensor.shape) for tensor in optimizer_state(a, one[0]).values()]
    assert (
        shapes
        == {"Sgd": [(3, 4)], "Larc": [(3, 4)], "Adam": [(3, 4), (3, 4)], "NovoGrad": [(3, 4), ()]}[
            type(rule).__name__
        ]
    )
    assert all(not tensor.any() for p in one for tensor in optimizer_state(a, p).values())
    walk(a, one, range(2))
    walk(b, other, range(2))
    assert_equal(one, other)


def test_state_that_is_no_tensor_and_state_that_goes_away() -> None:
    some = parameters((2,))
    optimizer = user(Counting, some)
    walk(optimizer, some, range(3))
    live = optimizer_state(optimizer, some[0])
    assert list(live) == ["count:int", "z"] and (
        live["count:int"].item(),
        live["count:int"].dtype,
    ) == (3.0, torch.float64)
    kept = optimizer.state[some[0]]["z"]
    load_optimizer_state(
        optimizer, some[0], {"count:int": np.array(7.0), "z": np.array([4.0, 5.0], np.float32)}
    )
    assert optimizer.state[some[0]]["count"] == 7 and type(optimizer.state[some[0]]["count"]) is int
    assert optimizer.state[some[0]]["z"] is kept and kept.tolist() == [4.0, 5.0]
    with pytest.raises(UserError) as caught:
        load_optimizer_state(optimizer, some[0], {"z": np.ones(3)})
    assert caught.value.what == "state z has shape (3,), the optimizer's has (2,)"
    assert "options of the checkpoint" in caught.value.fix
    load_optimizer_state(optimizer, some[0], {})
    assert optimizer_state(optimizer, some[0]) == {}


def test_what_a_class_counts_in_its_groups_is_state() -> None:
    some = parameters((2, 2), (3,))
    optimizer = user(CountsInGroups, some, "optim.eps=0.25")
    assert optimizer_state(optimizer, some[0]) == {}, "options and what the recipe sets are none"
    walk(optimizer, some, range(3))
    live = {key: tensor.tolist() for key, tensor in optimizer_state(optimizer, some[1]).items()}
    assert live == {
        "group.calls:int": 3.0,
        "group.odd:bool": 1.0,
        "group.sum": [6.0],
        "odd:bool": 1.0,
        "seen:int": 3.0,
    }
    load_optimizer_state(optimizer, some[1], {"group.odd:bool": np.array(0.0)})
    weights, biases = optimizer.param_groups
    assert (
        biases["odd"] is False
        and biases["calls"] == 0
        and "sum" not in biases
        and not optimizer.state[some[1]]
    )
    assert (weights["calls"], weights["odd"]) == (3, True)


def test_a_learner_with_counts_in_its_groups_goes_on() -> None:
    words = ["model.name=mlp", "model.widths=[3]", "optim.name=pytorch_optimizer.AdaBelief"]
    a, b = learner(*words), learner(*words, "seed=2")
    for step in range(3):
        a.step([a.to_device(batch(8, step))], hyper(8, 0.1), step)
    assert a.state()["s.fc1.weight.group.step:int"] == 3
    b.load(a.state())
    for one in (a, b):
        one.step([one.to_device(batch(8, 9))], hyper(8, 0.1), 9)
    assert digest(a.state()) == digest(b.state())


MADE_BY = "the checkpoint was written with "
HERE = "but this job has optim.name="
ADAM = "torch.optim.adam.Adam"
RMSPROP = "torch.optim.rmsprop.RMSprop"
CANNOT = f"{ADAM} cannot resume from this state: KeyError: 'max_exp_avg_sq'"


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (
            "torch.optim.RMSprop",
            "torch.optim.Adam",
            f"{MADE_BY}torch.optim.RMSprop, {HERE}torch.optim.Adam",
        ),
        (
            "torch.optim.Adagrad",
            "torch.optim.Adam",
            f"{MADE_BY}torch.optim.Adagrad, {HERE}torch.optim.Adam",
        ),
        (
            "sgd",
            "torch.optim.Adam",
            f"{MADE_BY}one of hvdtrain's own optimizers, {HERE}torch.optim.Adam",
        ),
        ("torch.optim.Adam", "adam", f"{MADE_BY}torch.optim.Adam, {HERE}adam"),
        ("torch.optim.Adam", "torch.optim.Adam optim.amsgrad=true", CANNOT),
        (
            "torch.optim.RMSprop",
            "torch.optim.RMSprop optim.momentum=0.5",
            f"{RMSPROP} cannot resume from this state: KeyError: ",
        ),
        ("torch.optim.Adam", "torch.optim:Adam optim.eps=1e-3", ""),
        ("torch.optim.Adam optim.amsgrad=true", "torch.optim.Adam", ""),
    ],
)
def test_the_state_of_another_optimizer_is_refused(before: str, after: str, what: str) -> None:
    a, b = (
        learner("model.name=mlp", "model.widths=[3]", *f"optim.name={words}".split())
        for words in (before, after)
    )
    a.step([a.to_device(batch(8))], hyper(8), 0)
    if not what:
        b.load(a.state())
        b.step([b.to_device(batch(8))], hyper(8), 1)
        return
    with pytest.raises(UserError) as caught:
        b.load(a.state())
    assert caught.value.what.startswith(what) and caught.value.where == "state of the optimizer"
    fix = "use the optimizer and options of the checkpoint"
    if what.startswith(MADE_BY):
        fix = (
            f"optim.name={before}"
            if "." in before
            else "the optim.name of its run folder's config.yaml"
        )
    assert caught.value.fix == fix


def test_a_class_that_takes_no_zero_gradient_is_not_rehearsed() -> None:
    class Divides(Counting):
        def step(self, closure: Any = None) -> None:
            for p in (p for group in self.param_groups for p in group["params"]):
                self.state[p]["norm"] = 1 / p.grad.norm().item()

    (p,) = parameters((2,))
    optimizer = user(Divides, [p])
    load_optimizer_state(optimizer, p, {"norm:float": np.array(0.5)})
    assert optimizer.state[p] == {"norm": 0.5}
