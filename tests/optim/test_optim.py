"""Every rule against an independent implementation, against itself on three frameworks, and against
numbers worked out by hand."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import pytest
import torch
from oracles import CASES, Arrays, Case, Run

from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.optim.rule_optimizer import make_optimizer, set_hyper
from hvdtrain.optim.lars import Lars
from hvdtrain.optim.rule import ArrayOps, Rule

EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def build(name: str, **options: Any) -> Rule:
    return importlib.import_module(f"hvdtrain.optim.{name}").build(**options)


def of_each(rule: Rule, run: Run) -> list[Rule]:
    """What on_torch() makes of it too, by names that are the numbers of the arrays."""
    return [
        rule.of_parameter(str(i), w.shape, out)
        for i, (w, out) in enumerate(zip(run.weights(), run.excluded(), strict=True))
    ]


def on_numpy(rule: Rule, run: Run) -> Arrays:
    ops = ArrayOps(np)
    weights = run.weights()
    rules = of_each(rule, run)
    optimizer_state = [one.init(w, ops) for one, w in zip(rules, weights, strict=True)]
    for h in run.hypers():
        for i, g in enumerate(run.gradients(h.step)):
            one = h._replace(weight_decay=0.0) if run.excluded()[i] else h
            weights[i], optimizer_state[i] = rules[i].update(
                g, optimizer_state[i], weights[i], one, ops
            )
    return weights


def on_jax(rule: Rule, run: Run) -> Arrays:
    """One jitted update of all weights, whose numbers are tracers: it is compiled once."""
    ops = ArrayOps(jax.numpy)
    excluded = run.excluded()
    rules = of_each(rule, run)

    def update(
        gradients: list[Any], optimizer_state: list[Any], weights: list[Any], h: Hyper
    ) -> Any:
        hypers = [h._replace(weight_decay=0.0) if out else h for out in excluded]
        each = zip(rules, gradients, optimizer_state, weights, hypers, strict=True)
        moved = [one.update(g, s, w, own, ops) for one, g, s, w, own in each]
        return [w for w, _ in moved], [s for _, s in moved]

    with jax.enable_x64(True):
        weights: list[Any] = [jax.numpy.array(w) for w in run.weights()]
        optimizer_state = [one.init(w, ops) for one, w in zip(rules, weights, strict=True)]
        compiled = jax.jit(update)
        for h in run.hypers():
            weights, optimizer_state = compiled(run.gradients(h.step), optimizer_state, weights, h)
        assert compiled._cache_size() == 1
        return [np.asarray(w) for w in weights]


def on_torch(rule: Rule, run: Run) -> Arrays:
    weights = [torch.nn.Parameter(torch.tensor(w)) for w in run.weights()]
    optimizer = make_optimizer(rule, [(str(i), w) for i, w in enumerate(weights)], run.exclude)
    for h in run.hypers():
        set_hyper(optimizer, h)
        for w, g in zip(weights, run.gradients(h.step), strict=True):
            w.grad = torch.tensor(g)
        optimizer.step()
    return [w.detach().numpy() for w in weights]


def distance(one: Arrays, other: Arrays) -> float:
    """The largest difference of two numbers, in shares of the largest of their array."""
    return max(
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(one, other, strict=True)
    )


@pytest.fixture
def float64() -> Any:
    """NvNovoGrad keeps its v in torch's default dtype."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.in_turn
@EVERY
def test_a_rule_equals_an_independent_implementation(case: Case, float64: None) -> None:
    ours = on_numpy(build(case.name, **case.options), case.run)
    for name, oracle in case.oracles.items():
        assert distance(ours, oracle(case.run)) < 1e-12, name
    # every array has moved
    assert all(distance([a], [b]) > 0.02 for a, b in zip(ours, case.run.weights(), strict=True))


@pytest.mark.in_turn
@EVERY
@pytest.mark.parametrize(("exclude", "decay"), [(True, 0.05), (False, 0.0)])
def test_a_rule_is_the_same_on_every_framework(case: Case, exclude: bool, decay: float) -> None:
    rule = build(case.name, **case.options)
    run = case.run._replace(exclude=exclude, decay=decay)
    reference = on_numpy(rule, run)
    assert distance(on_torch(rule, run), reference) < 1e-12
    assert distance(on_jax(rule, run), reference) < 1e-12


def test_the_forms_of_lars_are_equal_until_the_rate_changes() -> None:
    paper = Lars("paper")
    torchs = Lars("torch")
    steady = Run(20.0, steady=True)
    changing = Run(20.0)
    assert distance(on_numpy(paper, steady), on_numpy(torchs, steady)) < 1e-12
    assert distance(on_numpy(paper, changing), on_numpy(torchs, changing)) > 1e-3


def test_lars_of_optax_divides_by_the_norm_of_the_decayed_gradient() -> None:
    """Ours, as in the paper, by |g| + d |p|; theirs by |g + d p|: the first steps are parallel,
    ours shorter by the ratio of the two."""
    run = Run(20.0, steady=True)
    p = run.weights()[0]
    g = run.gradients(0)[0]
    h = run.hypers()[0]
    ours, _ = Lars("paper").update(g, (np.zeros_like(p),), p, h, ArrayOps(np))
    with jax.enable_x64(True):
        transform = optax.lars(h.lr, h.weight_decay, momentum=h.momentum)
        theirs = p + np.asarray(
            transform.update(jax.numpy.array(g), transform.init(p), jax.numpy.array(p))[0]
        )
    length = np.linalg.norm
    shorter = length(g + h.weight_decay * p) / (length(g) + h.weight_decay * length(p))
    assert 0.5 < shorter < 0.95
    np.testing.assert_allclose(p - ours, shorter * (p - theirs), rtol=1e-9)


def hyper(**numbers: Any) -> Hyper:
    return Hyper(**{"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "batch": 1, **numbers})


ONES = (np.ones((1, 2)),)
ADAM = (np.array([[0.5, 1.0]]), np.array([[227.2 / 3, 14.4]]))
NOVO = (np.ones((1, 2)), np.array(40.0))
TWO = {"momentum": 0.5, "step": 1}
# p = (3, 4), so |p| = 5; lr 0.5, momentum 0.9, decay 0.1. First rows: g = (8, -6), |g| = 10, v =
# (1, 1), g + d p = (8.3, -5.6). Adam's kin: b1 0.5, b2 0.6, t = 2, (4, 2) for what goes into the
# means: m = (0.25 + 2, 0.5 + 1) = (2.25, 1.5), over 1 - 0.5^2 (3, 2); v = 0.6 v + 0.4 (16, 4) =
# (51.84, 10.24), over 1 - 0.6^2 (81, 16); so with eps 1 the step is (3 / 10, 2 / 5) = (0.3, 0.4).
BY_HAND = [
    ("sgd", {}, (8, -6), ONES, {}, (-1.6, 6.35), [(9.2, -4.7)]),  # v = (0.9 + 8.3, 0.9 - 5.6)
    (
        "sgd",
        {"nesterov": True},
        (8, -6),
        ONES,
        {},
        (-5.29, 8.915),
        [(9.2, -4.7)],
    ),  # (8.3 + 8.28, -5.6 - 4.23) = (16.58, -9.83)
    (
        "lars",
        {"trust": 0.021},
        (8, -6),
        ONES,
        {},
        (2.5085, 3.578),
        [(0.983, 0.844)],
    ),  # a = 0.021 * 5 / (10 + 0.5) = 0.01
    (
        "lars",
        {"trust": 0.021, "form": "paper"},
        (8, -6),
        ONES,
        {},
        (2.0585, 3.128),
        [(0.9415, 0.872)],
    ),  # lr a = 0.005
    (
        "larc",
        {"trust": 0.42, "eps": 0.0},
        (8, -6),
        ONES,
        {},
        (0.89, 4.67),
        [(4.22, -1.34)],
    ),  # a = 0.2, a / lr = 0.4
    (
        "larc",
        {"trust": 4.2, "eps": 0.0},
        (8, -6),
        ONES,
        {},
        (-1.6, 6.35),
        [(9.2, -4.7)],
    ),  # a = 2, a / lr = 4 is cut to 1
    (
        "larc",
        {"trust": 4.2, "eps": 0.0, "mode": "scale"},
        (8, -6),
        ONES,
        {},
        (-5.75, 9.15),
        [(17.5, -10.3)],
    ),  # 0.9 + 2 * (8.3, -5.6)
    (
        "adam",
        {"beta2": 0.6, "eps": 1.0},
        (3.7, 1.6),
        ADAM,
        TWO,
        (2.85, 3.8),
        [(2.25, 1.5), (51.84, 10.24)],
    ),  # g + d p = (4, 2)
    (
        "adamw",
        {"beta2": 0.6, "eps": 1.0},
        (4, 2),
        ADAM,
        TWO,
        (2.7, 3.6),
        [(2.25, 1.5), (51.84, 10.24)],
    ),  # 0.95 p - 0.5 (0.3, 0.4)
    (
        "lamb",
        {"beta2": 0.6, "eps": 1.0},
        (4, 2),
        ADAM,
        TWO,
        (1.5, 2.0),
        [(2.25, 1.5), (51.84, 10.24)],
    ),  # u = (0.6, 0.8), ratio 5 / 1
    (
        "novograd",
        {"beta2": 0.6, "eps": 2.0},
        (8, -6),
        NOVO,
        {},
        (2.0, 3.65),
        [(2.0, 0.7), 64],
    ),  # g / (8 + 2) + d p = (1.1, -0.2)
    (
        "novograd",
        {"eps": 0.0},
        (8, -6),
        (ONES[0], np.array(0.0)),
        {},
        (2.0, 3.65),
        [(2.0, 0.7), 100],
    ),  # the first: v = |g|^2
]


@pytest.mark.parametrize(
    ("name", "options", "g", "optimizer_state", "numbers", "moved", "after"), BY_HAND
)
def test_one_step_by_hand(
    name: str, options: dict, g: Any, optimizer_state: Any, numbers: dict, moved: Any, after: Any
) -> None:
    p = np.array([[3.0, 4.0]])
    p, optimizer_state = build(name, **options).update(
        np.array([g], float), optimizer_state, p, hyper(**numbers), ArrayOps(np)
    )
    np.testing.assert_allclose(p[0], moved, rtol=1e-14)
    for slot, expected in zip(optimizer_state, after, strict=True):
        np.testing.assert_allclose(np.ravel(slot), np.ravel(expected), rtol=1e-14)


class Few(NamedTuple):
    """A Run of few steps of one layer of two numbers."""

    p: tuple[float, float]
    steps: tuple[tuple[float, float], ...]
    rate: float = 2.0
    exclude: bool = False
    decay: float = 0.1

    def weights(self) -> Arrays:
        return [np.array([self.p], float)]

    def gradients(self, step: int) -> Arrays:
        return [np.array([self.steps[step]], float)]

    def hypers(self) -> list[Hyper]:
        return [hyper(lr=self.rate, step=step) for step in range(len(self.steps))]

    def excluded(self) -> list[bool]:
        return [False]


ZEROS = [  # p, g -> p after the first step, of rate 2
    ("lars", {}, (0, 0), (1, 2), (-2, -4)),  # no norm of the weights: the ratio is 1
    ("lars", {}, (3, 4), (0, 0), (2.4, 3.2)),  # no gradient: decayed unscaled, as by timm
    ("lars", {"form": "paper"}, (3, 4), (0, 0), (2.4, 3.2)),
    ("larc", {}, (0, 0), (1, 2), (-2, -4)),
    ("larc", {}, (3, 4), (0, 0), (3, 4)),  # no gradient: no decay, as by Apex
    ("larc", {"mode": "scale"}, (3, 4), (0, 0), (3, 4)),
    (
        "lamb",
        {"eps": 3.0},
        (0, 0),
        (1, 5),
        (-0.5, -1.25),
    ),  # u = g / (|g| + 3) for each number, the ratio is 1
    ("lamb", {}, (3, 4), (0, 0), (-3, -4)),  # u = d p, so |p| / |u| = 10 and the step is lr p
    ("lamb", {}, (0, 0), (0, 0), (0, 0)),
    ("novograd", {"eps": 0.0}, (3, 4), (0, 0), (2.4, 3.2)),  # nothing is divided by a v of 0
    ("adam", {}, (0, 0), (0, 0), (0, 0)),
]


@pytest.mark.parametrize("framework", [on_numpy, on_torch, on_jax])
@pytest.mark.parametrize(("name", "options", "p", "g", "expected"), ZEROS)
def test_zero_norms_and_a_zero_rate(
    name: str, options: dict, p: Any, g: Any, expected: Any, framework: Any
) -> None:
    rule = build(name, **options)
    np.testing.assert_allclose(framework(rule, Few(p, (g,)))[0][0], expected, rtol=1e-14)
    np.testing.assert_array_equal(framework(rule, Few(p, (g,), rate=0.0))[0][0], p)
    np.testing.assert_array_equal(framework(rule, Few(p, ((1, 2),), rate=0.0))[0][0], p)


def test_deviations_from_the_independent_implementations(float64: None) -> None:
    """At gradients of zero, as the rules' docstrings confess."""
    still = Few((3, 4), ((0, 0),))
    # decayed, times 1 / lr
    np.testing.assert_allclose(CASES["larc"].oracles["timm"](still)[0][0], (2.7, 3.6))
    # v = |g|^2 = 100 in the second step, or 0.02 * 100
    late = Few((3, 4), ((0, 0), (8, -6)), rate=1.0)
    first = on_numpy(build("novograd"), late._replace(steps=((0, 0),)))[0][0]
    ours, timm, kozistr = (
        on_numpy(build("novograd"), late),
        *(oracle(late) for oracle in CASES["novograd"].oracles.values()),
    )
    m = [0.9 * 0.1 * w + 0.1 * f for w, f in zip(late.p, first, strict=True)]
    np.testing.assert_allclose(ours[0][0], first - m - np.array([0.8, -0.6]), rtol=1e-9)
    np.testing.assert_allclose(
        kozistr[0] - timm[0], [np.array([8, -6]) * (0.1 - 2**-0.5)], rtol=1e-7
    )


@pytest.mark.parametrize(
    "name", ["sgd", "lars", "larc", "lamb", "novograd", "adam", "adamw", "muon"]
)
def test_dtypes_stay(name: str) -> None:
    rule = build(name)
    ops = ArrayOps(np)
    p = np.ones((2, 3), np.float32)
    optimizer_state = rule.init(p, ops)
    for step in range(2):
        p, optimizer_state = rule.update(np.ones_like(p), optimizer_state, p, hyper(step=step), ops)
    assert {p.dtype, *(slot.dtype for slot in optimizer_state)} == {np.dtype(np.float32)}


def test_rules_print_and_compare() -> None:
    assert (
        str(build("lars")) == "Lars(form='torch', trust=0.001, eps=0.0, adapt=True, momentum=0.9)"
    )
    assert (
        build("larc", trust=0.1) == build("larc", trust=0.1) != build("larc")
        and build("novograd").momentum == 0.95
    )
    for name in ("lars", "larc", "lamb"):
        assert [
            build(name).of_parameter("fc.bias", (3,), excluded).adapt for excluded in (False, True)
        ] == [True, False]
    assert all(
        build(name).of_parameter("fc.bias", (3,), True) == build(name)
        for name in ("sgd", "adam", "adamw", "novograd")
    )


def test_which_parameters_muon_leaves_to_another_rule() -> None:
    rule = build("muon", rest=("head.*",))
    kernel = rule.of_parameter("conv1.weight", (8, 2, 1, 1), False)
    assert (
        kernel == rule.of_parameter("conv2.weight", (8, 2), True) != rule and kernel.factor == 2.0
    )
    rest = [
        rule.of_parameter(name, shape, False)
        for name, shape in {"conv1.bias": (8,), "head.weight": (8, 2)}.items()
    ]
    assert [str(one) for one in rest] == ["adamw at 0.015 of the rate, momentum 0.9"] * 2


def test_muons_default_leaves_embeddings_and_the_last_layer_to_another_rule_and_no_attention() -> (
    None
):
    """Names of the models here, of torchvision's vision transformers, and of transformers' GPT-NeoX
    and Llama."""
    rule = build("muon")
    rest = (
        "tokens.weight positions.weight head.weight fc.weight dense.fc.weight heads.head.weight "
        "lm_head.weight model.lm_head.weight"
    )
    rest += (
        " model.embed_tokens.weight gpt_neox.embed_in.weight embed_out.weight patch_embed.weight"
    )
    matrices = (
        "blocks.0.attention.inputs.weight multihead_attn.in_proj_weight "
        "multi_head_attention.q.weight heads.0.query.weight"
    )
    matrices += " dense.fc1.weight layers.0.self_attn.q_proj.weight mlp.overhead.weight"
    assert [
        name
        for name in f"{rest} {matrices}".split()
        if rule.of_parameter(name, (8, 4), False) == rule.rule_of_rest
    ] == rest.split()


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("option", "names", "what", "fix"),
    [
        (
            "trust",
            ["lars", "larc"],
            "with a trust of {} no layer would be updated",
            "give a number above 0, as in optim.trust=0.001",
        ),
        (
            "eps",
            ["lars", "larc", "lamb", "novograd", "adam", "adamw"],
            "eps={} is negative or not finite",
            "give 0 or more",
        ),
        (
            "beta2",
            ["lamb", "novograd", "adam", "adamw"],
            "a beta2 of {} does not define a running mean",
            "give 0 or more and less than 1",
        ),
    ],
)
def test_options_out_of_range(
    option: str, names: list[str], what: str, fix: str, bad: float
) -> None:
    for name in names:
        with pytest.raises(UserError) as caught:
            build(name, **{option: bad})
        assert (caught.value.what, caught.value.where) == (what.format(bad), f"optim.{option}")
        assert caught.value.fix.startswith(fix)


def test_options_at_their_limits() -> None:
    with pytest.raises(UserError, match="with a trust of 0 no layer would be updated"):
        build("lars", trust=0)
    with pytest.raises(UserError, match="a beta2 of 1 does not define a running mean"):
        build("adam", beta2=1)
    build("adam", beta2=0, eps=0)
