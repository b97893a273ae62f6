"""A function of the named parameters that makes an optimizer with groups of its own: its steps are
torch's, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import ThreadRank, in_threads
from test_ranks_in_threads import (
    HYPER,
    MLP,
    SHARES,
    TASK,
    WORDS,
    all_samples,
    batch,
    check_equal,
    train,
)

import hvdtrain
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.config.sections.section import Given, name_of_object
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.optim.user_optimizer import take
from hvdtrain.frameworks.torch.parallel.by_library import fits_horovod
from hvdtrain.training.build import build_learner


def by_depth(
    named: list[tuple[str, torch.nn.Parameter]], slower: float = 0.1
) -> torch.optim.Optimizer:
    """The last layer's weights fast, without decay; all else slower, with another momentum."""
    matrices = [p for name, p in named if name.endswith("weight")]
    last = matrices[-1]
    rest = [p for _, p in named if p is not last]
    return torch.optim.SGD(
        [{"params": [last], "momentum": 0.5}, {"params": rest, "lr": slower, "weight_decay": 0.1}],
        lr=0.5,
        nesterov=False,
    )


def adam(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    flat = [p for _, p in named if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": flat, "weight_decay": 0.0}, {"params": [p for _, p in named if p.ndim >= 2]}],
        lr=1e-3,
    )


def net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)
    ).double()


RNG = np.random.default_rng(1)
DATA = {"x": RNG.normal(size=(24, 5)), "y": RNG.normal(size=(24, 2))}
JOB = ["task.name=regression", "batch.size=24", "speed.precision=fp64", "recipe.warmup=0"]


def job(folder: Path, make: Any, *words: str) -> dict[str, torch.Tensor]:
    model = net()
    hvdtrain.train(
        {"run": str(folder), "log": {"every_steps": 1}},
        *JOB,
        *words,
        model=model,
        optimizer=make,
        train_data=DATA,
        val_data=DATA,
    )
    return model.state_dict()


@pytest.mark.parametrize("make", [by_depth, adam, lambda named: by_depth(named, 0.02)])
def test_steps_are_those_of_the_optimizer(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = job(tmp_path / "run", make, "stop.steps=6", "recipe.schedule=linear")
    model = net()
    optimizer = make(list(model.named_parameters()))
    own = [group["lr"] for group in optimizer.param_groups]
    x, y = (torch.from_numpy(DATA[name]) for name in "xy")
    for step in range(6):
        for group, rate in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = rate * (1 - step / 6)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-11, atol=1e-12)


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    straight = job(tmp_path / "straight", by_depth, "stop.steps=6", "recipe.schedule=constant")
    job(tmp_path / "run", by_depth, "stop.steps=3", "recipe.schedule=constant")
    resumed = job(tmp_path / "run", by_depth, "stop.steps=6", "recipe.schedule=constant")
    assert all((resumed[name] == array).all() for name, array in straight.items())


def learner(communicator: Any, make: Any, state: Any, *words: str) -> Any:
    config = configure(None, [*WORDS, *MLP, *words])
    given = Given(
        name_of_object(make), make, {"optimizer": make}, framework="torch", unset={"base_lr": 1.0}
    )
    one = build_learner(
        config.replace(optim=config.optim.replace(name=given.name).with_given(given)),
        TASK,
        communicator,
    )
    if state:
        one.load(state)
    return one


@pytest.mark.parametrize("how", ["comm.reduce=bucket", "shard.stage=1", "shard.stage=2"])
@pytest.mark.parametrize("make", [by_depth, adam])
def test_ranks_make_the_steps_of_one_process(make: Any, how: str) -> None:
    """Uneven shares, one rank without samples; a function that asks for dimensions sees whole
    parameters."""
    alone = learner(SingleProcessCommunicator(), make, None, "optim.clip_norm=0.3")
    first = alone.state()
    expected = train(alone, all_samples, HYPER)

    def of_rank(rank: ThreadRank) -> Any:
        return train(
            learner(rank, make, first, how, "optim.clip_norm=0.3"),
            lambda step: batch(rank.rank, step),
            HYPER,
        )

    for found in in_threads(len(SHARES), of_rank):
        check_equal(found, expected)


def lacks_one(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in named][1:], lr=0.1)


def lbfgs(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([p for _, p in named])


def no_optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> Any:
    return [{"params": [p for _, p in named]}]


def others(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([*(p for _, p in named), torch.nn.Parameter(torch.zeros(2))], lr=0.1)


def adagrad(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([p for _, p in named], lr=0.1, initial_accumulator_value=1.0)


@pytest.mark.parametrize(
    ("make", "words", "what"),
    [
        (lacks_one, [], "the optimizer does not contain 0.weight, which would be trained"),
        (others, [], "has parameters that are not among those"),
        (lbfgs, [], "needs a closure"),
        (no_optimizer, [], "returns a list, not a torch.optim.Optimizer"),
        (by_depth, ["optim.weight_decay=0.1"], "optim.weight_decay would have no effect"),
        (by_depth, ["optim.momentum=0.9"], "optim.momentum would have no effect"),
        (
            by_depth,
            ["recipe.schedule=one_cycle", "recipe.cycle_momentum=[0.85,0.95]"],
            "groups with their own momentum",
        ),
        (by_depth, ["optim.faster=2"], "unexpected keyword argument 'faster'|got an unexpected"),
        (by_depth, ["optim.ema=0.9"], "optim.ema needs an optimizer of hvdtrain"),
        (by_depth, ["framework=jax"], "belongs to framework=torch"),
    ],
)
def test_what_does_not_fit_is_refused(
    make: Any, words: list[str], what: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=what):
        job(tmp_path / "run", make, "stop.steps=1", *words)


def test_by_import_path_the_rate_that_multiplies_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        UserError, match="their own rates, which optim.base_lr would multiply"
    ) as caught:
        job(tmp_path / "run", "test_own_groups:by_depth", "stop.steps=3")
    assert caught.value.fix == "optim.base_lr=1"
    by_path = job(
        tmp_path / "run",
        "test_own_groups:by_depth",
        "stop.steps=3",
        caught.value.fix,
        "optim.slower=0.02",
    )
    by_object = job(tmp_path / "other", lambda named: by_depth(named, 0.02), "stop.steps=3")
    assert all((by_path[name] == array).all() for name, array in by_object.items())


def test_a_class_follows_the_momentum_of_a_cycle(tmp_path: Path) -> None:
    """As torch's own OneCycleLR with cycle_momentum; a class without momentum is refused."""
    cycle = [
        "recipe.schedule=one_cycle",
        "recipe.cycle_momentum=[0.85,0.95]",
        "stop.steps=6",
        "optim.base_lr=0.1",
    ]
    found = job(tmp_path / "run", "torch.optim.SGD", *cycle)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.1, total_steps=7, pct_start=(0.3 * 6 + 1) / 7
    )
    x, y = (torch.from_numpy(DATA[name]) for name in "xy")
    for _ in range(6):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=1e-11, atol=1e-12)
    with pytest.raises(UserError, match=r"Adagrad has no momentum") as caught:
        job(tmp_path / "other", "torch.optim.Adagrad", *cycle)
    assert caught.value.where.startswith("recipe.cycle_momentum")


class Strong(torch.optim.SGD):
    """With a decay of its own."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.5) -> None:
        super().__init__(params, lr=lr, weight_decay=weight_decay)


def test_horovod_does_not_get_what_it_would_construct_otherwise() -> None:
    """It constructs the class again from the groups: what the constructor alone acts on would be
    lost, all else is in the groups."""
    named = list(net().named_parameters())
    for optimizer, lost in (
        (adagrad(named), "initial_accumulator_value"),
        (by_depth(named), ""),
        (torch.optim.Adam([p for _, p in named], betas=(0.5, 0.9), amsgrad=True), ""),
        (
            Strong([p for _, p in named], weight_decay=0.1),
            "weight_decay",
        ),  # of a class that is not torch's nobody knows
    ):
        take(optimizer, ())
        assert fits_horovod(
            optimizer, named
        ) == f"Horovod would construct {type(optimizer).__name__} again without its {lost}" * bool(
            lost
        )


@pytest.mark.parametrize("named", ["test_own_groups:Strong", Strong])
def test_a_class_keeps_its_own_decay(named: Any, tmp_path: Path) -> None:
    found = job(tmp_path / "run", named, "stop.steps=3", "optim.base_lr=0.01", "optim.exclude=none")
    other = job(
        tmp_path / "other",
        named,
        "stop.steps=3",
        "optim.base_lr=0.01",
        "optim.exclude=none",
        "optim.weight_decay=0.5",
    )
    without = job(
        tmp_path / "without",
        named,
        "stop.steps=3",
        "optim.base_lr=0.01",
        "optim.exclude=none",
        "optim.weight_decay=0",
    )
    assert all((found[name] == array).all() for name, array in other.items())
    assert not all((found[name] == array).all() for name, array in without.items())


def test_a_run_folder_is_resumed_by_the_same_script(tmp_path: Path) -> None:
    straight = job(tmp_path / "straight", by_depth, "stop.steps=6")
    job(tmp_path / "run", by_depth, "stop.steps=3")
    model = net()
    words = [f"resume={tmp_path / 'run'}", "stop.steps=6"]
    hvdtrain.train({}, *words, model=model, optimizer=by_depth, train_data=DATA, val_data=DATA)
    assert all((model.state_dict()[name] == array).all() for name, array in straight.items())


def test_what_a_function_raises_has_its_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="fails: ZeroDivisionError") as caught:
        job(tmp_path / "run", lambda named: 1 / 0, "stop.steps=1")
    assert "test_own_groups.py" in caught.value.where
