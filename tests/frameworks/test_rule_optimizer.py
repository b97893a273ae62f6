"""Rules as torch.optim.Optimizers: many parameters in one call, each as in torch's own optimizer;
saved and loaded."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import Parameter

from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.optim.rule_optimizer import (
    RuleOptimizer,
    TorchOps,
    make_optimizer,
    optimizer_state,
    runs,
    set_hyper,
)
from hvdtrain.optim.adam import Adam
from hvdtrain.optim.lamb import Lamb
from hvdtrain.optim.larc import Larc
from hvdtrain.optim.novograd import NovoGrad
from hvdtrain.optim.rule import Rule
from hvdtrain.optim.sgd import Sgd

RULES = [Sgd(), Adam(), Larc(), NovoGrad()]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [
        Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for shape in shapes
    ]


def named(some: list[Parameter]) -> list[tuple[str, Parameter]]:
    return [(f"p{i}", p) for i, p in enumerate(some)]


def walk(optimizer: torch.optim.Optimizer, some: list[Parameter], steps: range) -> None:
    for step in steps:
        set_hyper(optimizer, Hyper(0.1 / (1 + step), 0.8, 0.01, batch=1, step=step))
        set_gradients(some, step)
        optimizer.step()


def set_gradients(some: list[Parameter], step: int) -> None:
    for i, p in enumerate(some):
        p.grad = torch.linspace(-1, 2 + step + i % 4, p.numel(), dtype=p.dtype).view(p.shape)


def assert_equal(one: list[Parameter], other: list[Parameter]) -> None:
    for p, q in zip(one, other, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


SHAPES = ((3, 4), (5,), (2, 3, 2, 2), ())


@pytest.mark.parametrize("rule", RULES)
def test_one_by_one_and_together_are_equal(rule: Rule) -> None:
    together, alone = parameters(*SHAPES), parameters(*SHAPES)
    walk(make_optimizer(rule, named(together), True), together, range(4))
    one_by_one = make_optimizer(rule, named(alone), True)
    assert isinstance(one_by_one, RuleOptimizer) and one_by_one.run_bytes == 8 << 20
    one_by_one.run_bytes = 1
    walk(one_by_one, alone, range(4))
    assert_equal(together, alone)


def test_runs_hold_one_dtype_and_about_so_many_bytes() -> None:
    a, b, c, d = parameters((10,), (1,), (20,), (1,))  # 80, 88, 248, 256 bytes up to their ends
    (e,) = parameters((2,), dtype=torch.float32)
    assert [[id(p) for p in run] for run in runs([a, b, e, c, d], 100, RuleOptimizer.bytes_of)] == [
        [id(a), id(b)],
        [id(c), id(d)],
        [id(e)],
    ]
    assert list(runs([], 100, RuleOptimizer.bytes_of)) == []


@pytest.mark.parametrize("rule", RULES)
def test_dtypes_mix_and_stay(rule: Rule) -> None:
    mixed = [*parameters(*SHAPES), *parameters(*SHAPES, dtype=torch.float32)]
    optimizer = make_optimizer(rule, named(mixed), True)
    walk(optimizer, mixed, range(3))
    assert all(
        tensor.dtype == p.dtype for p in mixed for tensor in optimizer_state(optimizer, p).values()
    )
    for p, q in zip(mixed[:4], mixed[4:], strict=True):
        np.testing.assert_allclose(p.detach(), q.detach(), rtol=1e-4, atol=1e-5)


def test_channels_last_weights_have_the_same_norms() -> None:
    (p,) = parameters((4, 3, 5, 2))
    strided = p.detach().contiguous(memory_format=torch.channels_last)
    assert not strided.is_contiguous()
    expected = np.linalg.norm(p.detach().numpy())
    np.testing.assert_allclose(
        TorchOps().norm([p.detach(), strided]), [expected, expected], rtol=1e-14
    )


def test_factors_of_zero_and_one_touch_nothing() -> None:
    ops = TorchOps()
    nan = [torch.tensor([torch.nan])]
    y = [torch.tensor([3.0])]
    assert ops.axpy(0.0, nan, y)[0].item() == ops.scale(1.0, y)[0].item() == 3.0
    assert y[0]._version == 0  # nothing was written


@pytest.mark.parametrize("rule", [*RULES, Sgd(nesterov=True), Lamb()])
def test_a_gradient_stays_as_it_is(rule: Rule) -> None:
    some = parameters(*SHAPES)
    walk(make_optimizer(rule, named(some), True), some, range(1))
    after = [p.grad for p in some]
    set_gradients(some, 0)
    assert all(torch.equal(g, p.grad) for g, p in zip(after, some, strict=True))


def test_two_groups_and_the_numbers_of_each() -> None:
    some = parameters((3, 4), (5,), (2, 3, 2, 2), ())
    optimizer = make_optimizer(Larc(), named(some), True)
    set_hyper(optimizer, Hyper(0.3, 0.7, 0.02, batch=8, step=5))
    shown = [
        [[tuple(p.shape) for p in group["params"]], *(group[key] for key in HYPER)]
        for group in optimizer.param_groups
    ]
    assert shown == [
        [[(3, 4), (2, 3, 2, 2)], Larc(), 0.3, 0.7, 0.02, 5],
        [[(5,), ()], Larc(adapt=False), 0.3, 0.7, 0.0, 5],
    ]
    (all_alike,) = make_optimizer(Larc(), named(some), False).param_groups
    (only_weights,) = make_optimizer(Larc(), named(some[:1]), True).param_groups
    (only_biases,) = make_optimizer(Larc(), named(some[1:2]), True).param_groups
    assert [len(group["params"]) for group in (all_alike, only_weights, only_biases)] == [4, 1, 1]
    assert [group["rule"].adapt for group in (all_alike, only_weights, only_biases)] == [
        True,
        True,
        False,
    ]


HYPER = ["rule", "lr", "momentum", "weight_decay", "step"]


def test_alone_with_a_scheduler_of_torch_and_a_closure() -> None:
    """v = 0.95 v + g / |g|: with g = 2 always 1, 1.95, 2.8525; the rate halves at each step."""
    (p,) = parameters((1, 1))
    start = p.item()
    optimizer = RuleOptimizer([p], NovoGrad(eps=0.0), lr=0.8)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 2 * p.sum()
        loss.backward()
        return loss

    for _ in range(3):
        before = p.item()
        assert optimizer.step(closure).item() == pytest.approx(2 * before)
        scheduler.step()
    assert p.item() == pytest.approx(start - 0.8 - 0.4 * 1.95 - 0.2 * 2.8525, abs=1e-12)
    assert (optimizer.param_groups[0]["step"], optimizer.param_groups[0]["momentum"]) == (3, 0.95)


def test_an_optimizer_needs_a_rule() -> None:
    with pytest.raises(
        ValueError, match="didn't specify a value of required optimization parameter rule"
    ):
        RuleOptimizer(parameters((2, 2)))


def test_no_gradient_leaves_a_parameter_out_but_its_group_counts_on() -> None:
    """Adam's first step is lr g / |g|. One step late we have m = 0.1 g / 0.19, v = 0.001 g g /
    0.001999; torch counts it as the first."""
    late = {}
    for make in (
        lambda some: RuleOptimizer(some, Adam(eps=0.0), lr=1.0),
        lambda some: torch.optim.Adam(some, lr=1.0, eps=0.0),
    ):
        first, second = parameters((1, 1), (1, 1))
        optimizer = make([first, second])
        start = second.item()
        first.grad = torch.ones_like(first)
        optimizer.step()
        assert second.item() == start and second not in optimizer.state
        second.grad = torch.ones_like(second)
        optimizer.step()
        late[type(optimizer)] = start - second.item()
    assert late[RuleOptimizer] == pytest.approx(0.1 / 0.19 * (0.001999 / 0.001) ** 0.5)
    assert late[torch.optim.Adam] == pytest.approx(1.0)


def test_a_sparse_gradient_is_refused() -> None:
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = RuleOptimizer(table.parameters(), Sgd(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(UserError) as caught:
        optimizer.step()
    assert (
        caught.value.what
        == "a parameter of shape (5, 3) has a sparse gradient, which no optimizer rule supports"
    )
    assert "nn.Embedding: sparse=False" in caught.value.fix


@pytest.mark.parametrize("rule", RULES)
def test_a_state_dict_continues_where_it_was_taken(rule: Rule) -> None:
    one, other = parameters(*SHAPES), parameters(*SHAPES)
    a, b = (make_optimizer(rule, named(some), True) for some in (one, other))
    walk(a, one, range(3))
    b.load_state_dict(copy.deepcopy(a.state_dict()))
    for p, q in zip(one, other, strict=True):
        q.data.copy_(p.data)
    assert b.param_groups[0]["step"] == 3
    for optimizer, some in ((a, one), (b, other)):
        walk(optimizer, some, range(3, 5))
    assert_equal(one, other)
