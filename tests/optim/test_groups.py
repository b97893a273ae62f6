"""Groups of parameters by name: their rate, decay and momentum against torch's own parameter
groups, and what is refused at the start."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from oracles import M, Run
from ranks import needs_extra
from test_optim import distance, on_jax, on_numpy, on_torch

from hvdtrain.__main__ import is_command, main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import USER, UserError
from hvdtrain.frameworks.by_name import build_rule, check_patterns
from hvdtrain.optim.groups import ScaledRule
from hvdtrain.optim.muon import Muon
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

GROUPS = 'optim.groups=[{"names":"[01]","rate":64,"decay":0.1},{"names":"*2","momentum":0.5},{"names":"0","rate":1000000}]'  # noqa: E501
SHAPES = {"stem.weight": (4, 2, 3, 3), "stem.bias": (4,), "fc.weight": (3, 4), "fc.bias": (3,)}


def config_of(*words: str) -> Any:
    return configure(None, list(words))


@pytest.mark.parametrize(
    ("name", "theirs"), [("sgd", torch.optim.SGD), ("adamw", torch.optim.AdamW)]
)
def test_groups_are_torchs_parameter_groups_on_every_framework(
    name: str, theirs: type[torch.optim.Optimizer]
) -> None:
    run = Run(0.001, decay=0.05, exclude=False)
    rule = build_rule(config_of(f"optim.name={name}", GROUPS))
    assert rule.momentum == 0.9, "the optimizer's momentum"
    weights = [torch.nn.Parameter(torch.tensor(w)) for w in run.weights()]
    # of the arrays 0 to 4: the first entry counts
    shares = [
        (64, 0.1, M),
        (64, 0.1, M),
        (1, 1, 0.5),
        (1, 1, M),
        (1, 1, M),
    ]
    groups = [
        {
            "params": [w],
            "weight_decay": run.decay * decay,
            **({"momentum": m} if name == "sgd" else {"betas": (m, 0.999)}),
        }
        for w, (_, decay, m) in zip(weights, shares, strict=True)
    ]
    optimizer: Any = theirs(groups)  # type: ignore[call-arg]
    for h in run.hypers():
        for w, g, group, (rate, _, _) in zip(
            weights, run.gradients(h.step), optimizer.param_groups, shares, strict=True
        ):
            w.grad, group["lr"] = torch.tensor(g), h.lr * rate
        optimizer.step()
    expected = [w.detach().numpy() for w in weights]
    for walk in (on_numpy, on_torch, on_jax):
        assert distance(walk(rule, run), expected) < 1e-12, walk
    assert distance(on_numpy(build_rule(config_of(f"optim.name={name}")), run), expected) > 1e-3


def test_a_group_scales_what_muon_leaves_to_another_rule_too() -> None:
    rule = build_rule(
        config_of(
            "optim.name=muon",
            'optim.groups=[{"names":"*.bias","rate":4,"momentum":0.5},{"names":"stem.*","rate":0.5}]',
        )
    )
    of = {name: rule.of_parameter(name, shape, len(shape) < 2) for name, shape in SHAPES.items()}
    assert str(of["stem.bias"]) == "adamw at 0.06 of the rate, momentum 0.5"
    assert str(of["fc.weight"]) == "adamw at 0.015 of the rate, momentum 0.9"
    stem = of["stem.weight"]
    assert (
        isinstance(stem, ScaledRule)
        and isinstance(stem.rule, Muon)
        and str(stem) == "muon at 0.5 of the rate"
    )


@pytest.mark.parametrize("framework", ["torch", "numpy", "jax"])
def test_a_step_of_a_learner_by_hand(framework: str) -> None:
    """From zero gradients: decoupled decay alone moves the weights, by rate x decay of each
    group."""
    task = Classification((2, 2, 1), 3, np.array([0.4]), np.array([0.2]))
    words = [
        f"framework={framework}",
        "model.name=linear",
        "speed.precision=fp64",
        "optim.name=adamw",
        "optim.exclude=none",
    ]
    config = config_of(
        *words,
        'optim.groups=[{"names":"*.bias","rate":8,"decay":0.25},{"names":"fc.w*","decay":3}]',
    )
    learner = build_learner(config, task, SingleProcessCommunicator())
    before = {
        name: np.ones_like(array) if name.startswith("p.") else array
        for name, array in learner.state().items()
    }
    learner.load(before)
    # weights of 0: no gradient
    images = {
        "x": np.zeros((2, 2, 2, 1), np.uint8),
        "y": np.zeros(2, np.int64),
        "w": np.zeros(2),
    }
    learner.step(
        [learner.to_device(images)], Hyper(lr=0.01, momentum=0.9, weight_decay=0.1, batch=2), 0
    )
    after = learner.state()
    np.testing.assert_allclose(after["p.fc.bias"], 1 - 0.08 * 0.025, rtol=1e-13)
    np.testing.assert_allclose(after["p.fc.weight"], 1 - 0.01 * 0.3, rtol=1e-13)


@pytest.mark.parametrize(
    ("groups", "what", "fix"),
    [
        (
            '[{"names":"fc.wieght"}]',
            "optim.groups[0], names=fc.wieght, matches no parameter of the model",
            "did you mean fc.weight?",
        ),
        (
            '[{"names":"bias"}]',
            "optim.groups[0], names=bias, matches no parameter of the model",
            "did you mean fc.bias?",
        ),
        (
            '[{"names":"q"}]',
            "optim.groups[0], names=q, matches no parameter of the model",
            "a name with *, as in '*.bias'; known: stem.weight, stem.bias, fc.weight, fc.bias",
        ),
        (
            '[{"names":"fc.*","rate":2},{"names":"*c.bias"}]',
            "optim.groups[1], names=*c.bias, matches only parameters that earlier entries match: "
            "fc.bias",
            "put it before them, or leave it out",
        ),
        (
            '[{"names":"*.bias","decay":0.1}]',
            "optim.groups[0], names=*.bias, has decay=0.1, but optim.exclude=norms_and_biases "
            "excludes stem.bias from decay",
            "optim.exclude=none, or an entry without decay",
        ),
    ],
)
def test_an_entry_that_would_change_nothing_is_an_error_at_the_start(
    groups: str, what: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        check_patterns(config_of(f"optim.groups={groups}"), SHAPES)
    assert (caught.value.what, caught.value.where, caught.value.fix) == (
        what,
        "optim.groups, command line",
        fix,
    )
    check_patterns(
        config_of('optim.groups=[{"names":"*.bias","rate":2},{"names":"fc.*","decay":3}]'), SHAPES
    )


def test_a_name_in_muons_rest_that_fits_no_parameter_is_an_error_and_its_default_may_fit_none() -> (
    None
):
    for names, fix in (
        ("[stem.*,fc.wieght]", "did you mean fc.weight?"),
        ("[stem.*,lm_head.*]", "a name with *, as in '*.bias'; known: stem.we"),
    ):
        with pytest.raises(
            UserError, match=r"optim\.rest\[1\], .*, matches no parameter of the model"
        ) as caught:
            check_patterns(config_of("optim.name=muon", f"optim.rest={names}"), SHAPES)
        assert caught.value.where == "optim.rest, command line" and caught.value.fix.startswith(fix)
    check_patterns(config_of("optim.name=muon"), {"conv.weight": (4, 2, 3, 3)})
    check_patterns(config_of("optim.name=muon", "optim.rest=[]"), SHAPES)


@pytest.mark.parametrize("framework", ["torch", "numpy", "jax"])
@pytest.mark.parametrize(
    ("words", "what"),
    [
        (
            'optim.groups=[{"names":"fc.bais"}]',
            r"names=fc\.bais, matches no parameter of the model",
        ),
        (
            "optim.name=muon optim.rest=[head.*]",
            r"optim\.rest\[0\], head\.\*, matches no parameter",
        ),
    ],
)
def test_every_framework_judges_the_names_before_the_first_step(
    words: str, what: str, framework: str
) -> None:
    task = Classification((2, 2, 1), 3, np.array([0.4]), np.array([0.2]))
    with pytest.raises(UserError, match=what):
        build_learner(
            config_of(f"framework={framework}", "model.name=linear", *words.split()),
            task,
            SingleProcessCommunicator(),
        )


@pytest.mark.parametrize(
    ("words", "what", "fix"),
    [
        (
            'model.freeze=["*bias"] optim.groups=[{"names":"*.bias","rate":2}]',
            "optim.groups[0], names=*.bias, matches only fc.bias, which model.freeze freezes",
            "leave the entry out, or use patterns of model.freeze that do not match them",
        ),
        (
            'model.freeze=["*bias"] optim.name=muon optim.rest=["*bias"]',
            "optim.rest[0], *bias, matches only fc.bias, which model.freeze freezes",
            "leave the entry out, or use patterns of model.freeze that do not match them",
        ),
        pytest.param(
            'model.lora=[fc] model.lora_rank=2 optim.groups=[{"names":"*.weight","rate":2}]',
            "optim.groups[0], names=*.weight, matches only fc.weight, which model.lora freezes",
            "leave the entry out; model.lora_train lists what is trained besides the adapters",
            marks=needs_extra("pretrained"),
        ),
    ],
)
def test_an_entry_for_frozen_parameters_names_what_freezes_them(
    words: str, what: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    task = Classification((2, 2, 1), 3, np.array([0.4]), np.array([0.2]))
    given = ["model.name=linear", *words.split()]
    with pytest.raises(UserError) as caught:
        build_learner(config_of(*given), task, SingleProcessCommunicator())
    assert (caught.value.what, caught.value.fix) == (what, fix)
    if is_command("plan"):
        assert main(["plan", "--ranks", "1", *given]) == USER
        assert what in capsys.readouterr().err
    with pytest.raises(UserError, match=r"matches only fc\.bias, which the model does not train"):
        check_patterns(
            config_of('optim.groups=[{"names":"*c.bias"}]'),
            {"fc.weight": (3, 4)},
            frozen=lambda: ["fc.bias"],
        )


def test_rates_by_depth() -> None:
    """Of layer n of three 2 x 0.5^(2 - n), by the number that # stands for."""
    rule = build_rule(
        config_of('optim.groups=[{"names":"blocks.#.*","rate":2,"layer_rate":0.5,"layers":3}]')
    )
    shapes = {f"blocks.{n}.fc.weight": (2, 3) for n in range(3)} | {
        "head.weight": (2, 3),
        "blocks.x.weight": (2, 3),
    }
    rates = {
        name: getattr(rule.of_parameter(name, shape, False), "rate", 1)
        for name, shape in shapes.items()
    }
    assert list(rates.values()) == [0.5, 1, 2, 1, 1]
    check_patterns(
        config_of('optim.groups=[{"names":"blocks.#.*","layer_rate":0.5,"layers":3}]'), shapes
    )


@pytest.mark.parametrize(
    ("group", "what"),
    [
        (
            '{"names":"blocks.#.*","layer_rate":0.5,"layers":4}',
            "layers=4, but the model's layers are numbered from 0 to 2",
        ),
        ('{"names":"blocks.#.*","layer_rate":0.5}', "needs layer_rate, layers and one # together"),
        (
            '{"names":"blocks.*","layer_rate":0.5,"layers":3}',
            "needs layer_rate, layers and one # together",
        ),
        (
            '{"names":"blocks.#.#","layer_rate":0.5,"layers":3}',
            "needs layer_rate, layers and one # together|matches no parameter",
        ),
        ('{"names":"layers.#.*","layer_rate":0.5,"layers":3}', "matches no parameter of the model"),
    ],
)
def test_depths_that_are_none(group: str, what: str) -> None:
    shapes = {f"blocks.{n}.fc.weight": (2, 3) for n in range(3)} | {"head.weight": (2, 3)}
    with pytest.raises(UserError, match=what):
        check_patterns(config_of(f"optim.groups=[{group}]"), shapes)
