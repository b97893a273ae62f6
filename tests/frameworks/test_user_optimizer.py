"""A user's own class of torch.optim: what follows the recipe, what is refused, and how Horovod
takes it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
from ranks import needs_extra, needs_horovod, needs_mpirun
from safetensors.numpy import load_file
from schedule_free import ScheduleFree
from test_rule_optimizer import SHAPES, assert_equal, named, parameters, set_gradients, walk
from torch.nn import Parameter

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.build import check_optimizer
from hvdtrain.frameworks.torch.optim.rule_optimizer import make_user_optimizer, set_hyper
from hvdtrain.frameworks.torch.parallel.by_library import fits_horovod
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner


def user(make: Callable[..., Any], some: list[Parameter], *words: str) -> torch.optim.Optimizer:
    config = configure(None, ["optim.name=its.Name", *words])
    return make_user_optimizer(make, "its.Name", named(some), config)


class Counting(torch.optim.Optimizer):
    """Moves by lr, and keeps what torch's own do not: a Python number, and a text."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data -= group["lr"] * p.grad.sign()
                self.state[p] = {
                    "z": torch.ones(2),
                    "count": self.state[p].get("count", 0) + 1,
                    "note": "text",
                }


def test_options_and_numbers_reach_a_users_class() -> None:
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    words = [
        "optim.alpha=0.9",
        "optim.eps=1e-3",
        "optim.centered=true",
        "optim.momentum=0.5",
        "optim.weight_decay=0.01",
    ]
    optimizer = user(torch.optim.RMSprop, ours, *words)
    walk(optimizer, ours, range(4))
    # SHAPES: a weight, a bias, ...
    groups = [
        {"params": theirs[0::2], "weight_decay": 0.01},
        {"params": theirs[1::2], "weight_decay": 0.0},
    ]
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

    # torch's own, of biases too
    assert [group["weight_decay"] for group in groups(torch.optim.AdamW)] == [
        0.01,
        0.01,
    ]
    assert [
        group["weight_decay"] for group in groups(torch.optim.AdamW, "optim.weight_decay=0")
    ] == [0.02, 0.0]
    weights, biases = groups(torch.optim.RMSprop, "optim.weight_decay=0.1")
    assert (
        weights["lr"],
        weights["momentum"],
        weights["weight_decay"],
        biases["weight_decay"],
    ) == (0.3, 0, 0.02, 0.0)
    assert groups(torch.optim.RMSprop, "optim.momentum=0.5")[1]["momentum"] == 0.7
    assert tuple(groups(torch.optim.AdamW, "optim.betas=[0.8,0.99]")[0]["betas"]) == (0.8, 0.99)
    assert groups(torch.optim.AdamW, "optim.betas=[0.8,0.99]", "optim.momentum=0.5")[0][
        "betas"
    ] == (0.7, 0.99)
    assert groups(Counting)[0]["lr"] == 0.3 and "weight_decay" not in groups(Counting)[0]
    (together,) = groups(torch.optim.AdamW, "optim.exclude=none", "optim.weight_decay=0.1")
    assert len(together["params"]) == 4 and together["weight_decay"] == 0.02


def test_a_job_with_a_class_decays_as_the_class_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "model.name=linear",
        "optim.name=torch.optim.AdamW",
        "optim.base_lr=0.5",
        "stop.steps=3",
        "batch.size=1437",
        "log.every_steps=1",
    ]
    words += ["speed.precision=fp64", "checkpoint.every_steps=1"]
    assert (
        main([*words, "run=own"]) == 0
        and main([*words, "run=set", "optim.weight_decay=0.01", "optim.exclude=none"]) == 0
    )
    own, given = (
        load_file(f"{run}/checkpoints/step-00000003/weights.safetensors") for run in ("own", "set")
    )
    out = capsys.readouterr().out
    assert "        weight decay 0.01 of all parameters, the default of torch.optim.AdamW\n" in out
    assert "        weight decay 0.01, optim.weight_decay\n" in out
    assert own.keys() == given.keys() and all((own[name] == given[name]).all() for name in own)
    assert main([*words, "run=none", "optim.weight_decay=0"]) == 0
    assert any(
        (own[name] != array).any()
        for name, array in load_file("none/checkpoints/step-00000003/weights.safetensors").items()
    )


class NoRate(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"pace": 1.0})

    def step(self, closure: Any = None) -> None:
        pass


@pytest.mark.parametrize(
    ("make", "words", "what", "where", "fix"),
    [
        (torch.optim.Adam, ["optim.alpha=1"], "got an unexpected keyword argument "
                                              "'alpha'", "optim.name", "optim.<name>=<value>"),
        (torch.optim.Adam, ["optim.alpha=1"], "its.Name(params: ", "optim.name", "optim.<name>=<value>"),  # noqa: E501
        (torch.optim.Adam, ["optim.eps=-1"], "does not fit: Invalid epsilon value: "
                                             "-1", "optim.name", "optim.<name>=<value>"),
        (torch.optim.Adam, ["optim.betas=[0.8]"], "does not fit: IndexError: ", "optim.name", "optim.<name>=<value>"),  # noqa: E501
        (torch.optim.Adam, ["optim.ep=1e-8"], "got an unexpected keyword argument "
                                              "'ep'", "optim.name", "did you mean optim.eps?"),
        pytest.param(torch.optim.Adam, ["optim.wd=1"], "got an unexpected keyword argument 'wd'",
                     "optim.name", "did you mean optim.weight_decay?",
                     marks=needs_extra("other_words")),
        (torch.optim.Adam, ["optim.lr=1"], "is not optim.lr", "optim.lr, command line", "did you mean optim.base_lr?"),  # noqa: E501
        (torch.optim.SGD, ["optim.nesterov=true"], "Nesterov momentum requires a "
                                                   "momentum", "optim.name", "optim.<name>=<value>"),  # noqa: E501
        (torch.optim.LBFGS, [], "needs a closure", "optim.name", "one gradient per step"),
        (torch.nn.Linear, [], "its.Name(in_features: int, ", "optim.name", "torch.optim.RMSprop"),
        (torch.nn.Linear, [], "is not a subclass of "
                              "torch.optim.Optimizer", "optim.name", "torch.optim.RMSprop"),
        (torch.add, [], "its.Name(...) is not a subclass of "
                        "torch.optim.Optimizer", "optim.name", "torch.optim.RMSprop"),
        (NoRate, [], "its.Name has no lr; it has pace", "optim.name", "give another class"),
        (Counting, ["optim.weight_decay=1"], "has no weight_decay; it has "
                                             "lr", "optim.weight_decay, command "
                                                   "line", "leave optim"),
        (torch.optim.Adagrad, ["optim.momentum=0.9"], "has no momentum; it has ", "optim.momentum, "
                                                                                  "command line", "leave optim"),  # noqa: E501
    ],
)  # fmt: skip
def test_what_a_users_class_cannot_do_is_refused(
    make: Any, words: list[str], what: str, where: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        user(make, parameters(*SHAPES), *words)
    assert (
        what in caught.value.what
        and caught.value.where.startswith(where)
        and fix in caught.value.fix
    )


def test_the_classes_of_torch_optim_that_optim_name_takes() -> None:
    """As docs/recipes.md and the key's description say: not LBFGS; torch's Muon of matrices
    alone."""
    classes = [
        one
        for one in vars(torch.optim).values()
        if inspect.isclass(one) and issubclass(one, torch.optim.Optimizer)
    ]
    refused = []
    for one in classes:
        try:
            user(one, parameters(*SHAPES))
        except UserError:
            refused.append(one.__name__)
    assert (
        set(refused) <= {"LBFGS", "Muon", "Optimizer"} and "LBFGS" in refused and len(classes) > 12
    )


def test_momentum_reaches_a_constructor_that_asks_for_it() -> None:
    """SGD takes nesterov with a momentum only."""
    ours, theirs = parameters(*SHAPES), parameters(*SHAPES)
    # the walk has a decay of its own
    words = [
        "optim.nesterov=true",
        "optim.momentum=0.9",
        "optim.weight_decay=0.1",
    ]
    walk(user(torch.optim.SGD, ours, *words), ours, range(3))
    direct = torch.optim.SGD(
        [{"params": theirs[0::2], "weight_decay": 0.01}, {"params": theirs[1::2]}],
        lr=1.0,
        momentum=0.8,
        nesterov=True,
    )
    for step in range(3):
        for group in direct.param_groups:
            group["lr"] = 0.1 / (1 + step)
        set_gradients(theirs, step)
        direct.step()
    assert_equal(ours, theirs)
    words = ["optim.momentum=0.5"]
    assert [
        user(torch.optim.Adam, ours, *words, *more).defaults["betas"]
        for more in ([], ["optim.betas=[0.8,0.99]"])
    ] == [
        (0.5, 0.999),
        (0.5, 0.99),
    ]
    assert user(torch.optim.Adam, ours).defaults["betas"] == (0.9, 0.999)


def test_horovod_is_not_given_a_class_with_options() -> None:
    """It would make the class anew from its groups, where Adagrad's initial_accumulator_value has
    no effect."""
    some = parameters(*SHAPES)
    assert fits_horovod(user(torch.optim.Adagrad, some), named(some)) == ""
    why = fits_horovod(
        user(torch.optim.Adagrad, some, "optim.initial_accumulator_value=1.0", "optim.eps=0.1"),
        named(some),
    )
    assert why == "Horovod would construct Adagrad again without its initial_accumulator_value, eps"


ON_RANKS = """
import json, os, sys
import torch
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.comm.horovod import connect
from hvdtrain.comm.mesh import one_group
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.frameworks.stopwatch import HostStopwatch
from hvdtrain.frameworks.torch import build
from hvdtrain.frameworks.torch.optim import rule_optimizer as o
from hvdtrain.frameworks.torch.parallel.whole_model import select_strategy
from hvdtrain.core.progress import Hyper

WORDS = {
    "larc": [],
    "novograd": [],
    "torch.optim.RMSprop": ["optim.momentum=0.9"],
    "torch.optim.Adagrad": [],
    "torch.optim:Adagrad": ["optim.initial_accumulator_value=1.0"],
}

def walk(name, ranks, communicator):
    shapes = ((3, 4), (5,), (2, 3, 2))
    some = [torch.nn.Parameter(torch.linspace(-1, 2, 60, dtype=torch.float64)[: torch.Size(s).numel()].view(s)) for s in shapes]
    model = torch.nn.ParameterList(some)
    config = configure(None, [f"optim.name={name}", *WORDS[name]])
    named = list(model.named_parameters())
    optimizer = build.make_optimizer(config, named)
    strategy = select_strategy(config, one_group(communicator), named, optimizer, HostStopwatch())
    optimizer = strategy.wrap(model, optimizer).optimizer
    o.fill_optimizer_state(optimizer)

    def one_pass(step, divisor, is_last):
        losses = [(p * torch.arange(p.numel()).view(p.shape) * (1 + step[0] + 2.5 * rank)).cos().sum() for p in some for rank in ranks]
        sum(losses).backward()
        return {"loss": 0.0, "right": 0.0, "count": 1}

    for step in range(6):
        o.set_hyper(optimizer, Hyper(0.1 / (step + 1), 0.8, 0.01, batch=1, step=step))
        optimizer.zero_grad()
        strategy.run([[step]], 1, one_pass)
        strategy.reduce()
        strategy.optimizer_step(optimizer)
    state = [tensor.flatten() for p in some for tensor in o.optimizer_state(optimizer, p).values()]
    return torch.cat([*(p.flatten() for p in some), *state]).tolist(), strategy.summary

hvd = connect(placement(os.environ))
own = {name: [walk(name, [hvd.rank], hvd), walk(name, range(hvd.size), SingleProcessCommunicator())] for name in WORDS}
every = hvd.allgather_object(own)
if hvd.rank == 0:
    json.dump(every, open(sys.argv[1], "w"))
"""  # noqa: E501


@needs_mpirun
@needs_horovod
@pytest.mark.slow
def test_horovod_sums_the_gradients_of_two_ranks(tmp_path: Any) -> None:
    out = tmp_path / "out.json"
    result = ranks.mpirun(2, ["-c", ON_RANKS, str(out)])
    assert result.returncode == 0, result.stderr
    for own in json.loads(out.read_text()):  # of each rank
        for name, ((together, words), (alone, _)) in own.items():
            np.testing.assert_allclose(together, alone, rtol=1e-12, atol=1e-14, err_msg=name)
            bucket = (
                "gradients in 1 overlapped bucket: Horovod would construct Adagrad again without "
                "its initial_accumulator_value"
            )
            assert words == (bucket if ":" in name else "gradients by hvd.DistributedOptimizer")


def test_an_optimizer_with_modes_evaluates_and_saves_the_weights_to_evaluate() -> None:
    """z, their mean x and y between them, by their own formulas; a job from the state of a sync
    point has the same bits."""

    def made(state: Any) -> Any:
        words = [
            "model.name=linear",
            "optim.name=schedule_free:ScheduleFree",
            "speed.precision=fp64",
            "speed.device=cpu",
        ]
        one = build_learner(configure(None, words), task, alone)
        if state:
            one.load(state)
        return one

    def trained(one: Any, steps: range) -> dict[str, np.ndarray]:
        for step in steps:
            one.step(
                [one.to_device(dict(samples))],
                Hyper(lr=0.5, momentum=0.0, weight_decay=0.0, batch=8, step=step),
                step,
            )
            if step % 2:
                one.sync_buffers(alone)
        return dict(one.state())

    task = Classification((4, 4, 2), 3, np.zeros(2), np.ones(2))
    alone = SingleProcessCommunicator()
    rng = np.random.default_rng(0)
    samples = {"x": rng.integers(0, 256, (8, 4, 4, 2), dtype=np.uint8), "y": rng.integers(0, 3, 8)}
    first = made(None).state()
    one = made(first)
    by_hand = made(first)
    net = by_hand.model
    batch = by_hand.to_device(dict(samples))
    x = [p.detach().clone() for p in net.parameters()]
    z = [tensor.clone() for tensor in x]
    for step in range(6):
        with torch.no_grad():
            for p, p_x, p_z in zip(net.parameters(), x, z, strict=True):
                p.copy_(0.1 * p_z + 0.9 * p_x)
        gradients = torch.autograd.grad(
            by_hand.forward.train(batch).total / 8, list(net.parameters())
        )
        z = [p_z - 0.5 * g for p_z, g in zip(z, gradients, strict=True)]
        x = [p_x + (p_z - p_x) / (step + 1) for p_x, p_z in zip(x, z, strict=True)]
    middle = trained(one, range(4))
    loss = float(one.evaluate(batch)["loss"])
    straight = trained(one, range(4, 6))
    for (name, _), p_x in zip(net.named_parameters(), x, strict=True):
        np.testing.assert_allclose(straight[f"p.{name}"], p_x.numpy(), rtol=1e-11, atol=1e-13)
    resumed = made(middle)
    assert float(resumed.evaluate(batch)["loss"]) == loss
    again = trained(resumed, range(4, 6))
    assert again.keys() == straight.keys() and all(
        (again[name] == straight[name]).all() for name in straight
    )


def test_a_rank_cannot_have_parts_of_two_sets_of_weights() -> None:
    config = configure(
        None, ["model.name=linear", "optim.name=schedule_free:ScheduleFree", "shard.stage=1"]
    )
    with pytest.raises(
        UserError,
        match=r"train\(\) and eval\(\) of schedule_free:ScheduleFree switch between two sets of "
        r"weights",
    ):
        check_optimizer(config)


def test_an_own_loop_switches_an_optimizer_with_modes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever mode the script has set: training computes with y, evaluations and checkpoints have
    x, 2 steps at a rate of 1."""
    monkeypatch.chdir(tmp_path)
    data = {"x": np.ones((4, 1)), "y": np.array([0.0, 1.0, 2.0, 3.0])}
    seen: list[float] = []
    with hvdtrain.init({"run": "run", "log.every_steps": 1}) as ctx:
        net = torch.nn.Linear(1, 1, bias=False).double()
        torch.nn.init.zeros_(net.weight)
        net, optimizer = ctx.prepare(net, ScheduleFree(net.parameters(), lr=1.0, beta=0.5))
        for batch in ctx.samples(data, batch=4, epochs=3):
            seen.append(net.weight.item())
            ctx.backward(0.5 * ((net(batch["x"])[:, 0] - batch["y"]) ** 2).mean())
            optimizer.step()
            for _ in ctx.each(data, batch=4):
                seen.append(net.weight.item())
            optimizer.train()
            ctx.checkpoint(net, optimizer, now=True)
    # gradient y - 1.5; z: 0, 1.5, 1.5; x: 0, 1.5, 1.5 and y between them
    z = x = 0.0
    expected = []
    for step in range(3):
        y = 0.5 * z + 0.5 * x
        z -= y - 1.5
        x += (z - x) / (step + 1)
        expected += [y, x]
    assert seen == pytest.approx(expected, abs=1e-12)
    saved = load_file("run/checkpoints/step-00000003/weights.safetensors")["p.weight"].item()
    assert saved == net.weight.item() == pytest.approx(x, abs=1e-12)


def test_a_checkpoint_has_tuples_and_lists_of_numbers_that_a_scheduler_changes(
    tmp_path: Path,
) -> None:
    """OneCycleLR changes the first of betas in each step."""
    data = {"x": np.arange(6.0)[:, None], "y": np.arange(6.0)}
    seen: dict[str, list[Any]] = {"straight": [], "run": []}
    for run, stop in (("straight", 12), ("run", 5), ("run", 12)):
        with hvdtrain.init({"run": str(tmp_path / run), "log.every_steps": 100}) as ctx:
            net = torch.nn.Linear(1, 1, bias=False).double()
            torch.nn.init.zeros_(net.weight)
            net, optimizer = ctx.prepare(net, torch.optim.AdamW(net.parameters()))
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=13)
            group = optimizer.param_groups[0]
            group["own"] = [0, 0.5, False]
            if state := ctx.resume():
                cycle.load_state_dict(state["cycle"])
            for batch in ctx.samples(data, batch=2, epochs=4):
                seen[run].append((group["betas"], str(group["own"]), net.weight.item()))
                ctx.backward(((net(batch["x"])[:, 0] - batch["y"]) ** 2).mean())
                optimizer.step()
                cycle.step()
                group["own"] = [batch.step, 0.5, True]
                if ctx.step == stop:
                    ctx.checkpoint(net, optimizer, now=True, cycle=cycle.state_dict())
                    break
    assert seen["run"] == seen["straight"] and len(seen["run"]) == 12
    assert seen["run"][5][1] == "[4, 0.5, True]" and seen["run"][5][0] != seen["run"][0][0]
