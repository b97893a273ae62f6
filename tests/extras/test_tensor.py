"""Tensor parallelism: models with cut layers against whole ones, on ranks; cuts of arrays, and what
cannot be cut."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import ranks
import tensor_parallel_on_ranks
import torch
from pool import on_ranks
from ranks import needs_mpirun
from torch import nn
from torch.nn import functional

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.core.arrays import Cut
from hvdtrain.errors import UserError
from hvdtrain.extras.tensor.collectives import (
    SplitLogits,
    TensorParallelLink,
    VocabularyRange,
)
from hvdtrain.extras.tensor.plan import cut_model, plan_of, resolve
from hvdtrain.frameworks.torch.models import gpt, linear, mlp

RANKS = [
    pytest.param("mpi", 2, marks=[needs_mpirun, pytest.mark.slow]),
    *[
        pytest.param("mpi", 4, marks=[needs_mpirun, pytest.mark.slow, pytest.mark.ranks4]),
        pytest.param("torchdist", 2, marks=[needs_mpirun, pytest.mark.slow]),
    ]
    * ranks.FULL,
]


@functools.cache
def apart_on(engine: str, size: int) -> list[dict[str, dict[str, float]]]:
    """Each rank's."""
    return on_ranks(engine, size, "tensor_parallel_on_ranks:apart_by_case")


@pytest.mark.parametrize("case", tensor_parallel_on_ranks.cases())
@pytest.mark.parametrize(("engine", "size"), RANKS)
def test_ranks_with_parts_compute_what_the_whole_model_does(
    engine: str, size: int, case: str
) -> None:
    largest = max(max(one[case].values()) for one in apart_on(engine, size))
    if case.startswith("without-"):
        assert largest > 1e-3, "a sum over ranks is missing, and nothing differs"
    else:
        assert largest < (0.05 if case.startswith("half") else 1e-12)


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (Cut(0, 1, 2, 1), [[12, 13, 14, 15, 16, 17], [18, 19, 20, 21, 22, 23]]),
        (Cut(1, 1, 3, 0), [[0, 1], [6, 7], [12, 13], [18, 19]]),
        (Cut(1, 1, 3, 2), [[4, 5], [10, 11], [16, 17], [22, 23]]),
        (
            Cut(0, 2, 2, 1),
            [[6, 7, 8, 9, 10, 11], [18, 19, 20, 21, 22, 23]],
        ),  # of rows 0 and 1 the second, of rows 2 and 3 too
        (Cut(1, 2, 3, 1), [[1, 4], [7, 10], [13, 16], [19, 22]]),
        (Cut(0, 1, 3, 0, 4), [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]),
        (Cut(0, 1, 3, 2, 4), [[18, 19, 20, 21, 22, 23]]),
    ],
)
def test_the_part_of_a_cut(cut: Cut, expected: list[list[int]]) -> None:
    whole = np.arange(24).reshape(4, 6)
    np.testing.assert_array_equal(cut.take(whole), expected)
    assert torch.equal(cut.take(torch.from_numpy(whole)), torch.tensor(expected))
    assert cut.local_shape((4, 6)) == np.shape(expected) and cut.whole_shape(
        np.shape(expected)
    ) == (4, 6)
    stretches = [
        whole.reshape(-1)[first:behind] for first, behind in cut.runs((4, 6), 0, np.size(expected))
    ]
    np.testing.assert_array_equal(np.concatenate(stretches), np.ravel(expected))


@pytest.mark.parametrize(
    ("axis", "groups", "shape"),
    [
        (0, 1, (6, 5)),
        (1, 1, (5, 6)),
        (0, 3, (18,)),
        (0, 3, (18, 2)),
        (1, 2, (3, 12, 4)),
        (0, 1, (7, 2)),
        (1, 1, (2, 8)),
    ],
)
def test_parts_that_are_put_make_the_whole(axis: int, groups: int, shape: tuple[int, ...]) -> None:
    expected = np.random.default_rng(1).random(shape)
    found = np.full(shape, np.nan)
    as_tensor = torch.full(shape, torch.nan, dtype=torch.float64)
    for index in range(3):
        cut = Cut(axis, groups, 3, index, shape[axis])
        assert cut.take(expected).shape == cut.local_shape(shape)
        cut.put(found, cut.take(expected))
        cut.put(as_tensor, cut.take(torch.from_numpy(expected)))
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(as_tensor, expected)


def small_gpt(**options: Any) -> nn.Module:
    return gpt.build(
        "gpt", 5, options.pop("vocabulary", 8), **{"layers": 1, "heads": 2, "width": 8, **options}
    )


class Unused(nn.Module):
    """A model with any plan."""

    def __init__(self, plan: dict[str, str], **layers: nn.Module) -> None:
        super().__init__()
        self.plan = plan
        for name, layer in layers.items():
            self.add_module(name, layer)

    def tensor_plan(self) -> dict[str, str]:
        return self.plan


def tied_to_a_whole_layer() -> nn.Module:
    model = Unused(
        {"tokens": "vocabulary"}, tokens=nn.Embedding(8, 4), head=nn.Linear(4, 8, bias=False)
    )
    model.head.weight = model.tokens.weight
    return model


@pytest.mark.parametrize(
    ("model", "parts", "what", "fix"),
    [
        (
            small_gpt(),
            4,
            "blocks.0.attention.inputs has 2 units of 4 features in each of 3 groups to cut",
            "parallel.tensor=1 or 2$",
        ),
        (small_gpt(vocabulary=3), 4, "tokens has 3 tokens for 4 tensor ranks", "=3 or less$"),
        (
            mlp.build("mlp", (2, 2, 1), 3, widths=(6,)),
            4,
            "fc1 has 6 features to cut",
            "parallel.tensor=1 or 2 or 3 or 6$",
        ),
        (
            linear.build("linear", (2, 2, 1), 3),
            2,
            r"Linear has no tensor_plan\(\)",
            "def tensor_plan",
        ),
        (
            mlp.build("mlp", (2, 2, 1), 3, widths=()),
            2,
            r"tensor_plan\(\) of MLP names no layer to divide",
            "its layers are head",
        ),
        (
            Unused({"a.*": "rows"}, b=nn.Linear(2, 2)),
            2,
            "'a.*' names no layer of Unused",
            "its layers are b",
        ),
        (
            Unused({"b": "diagonal"}, b=nn.Linear(2, 2)),
            2,
            "b: 'diagonal' is not a way to divide a layer",
            '"columns of 3"',
        ),
        (
            Unused({"b": "columns of 3"}, b=nn.Linear(2, 4)),
            2,
            "b has 4 features, not a multiple of 3 x 1",
            "divide",
        ),
        (
            Unused({"b": "rows"}, b=nn.Conv2d(2, 2, 1)),
            2,
            "b is a Conv2d: rows cuts nn.Linear",
            "name layers of that class",
        ),
        (
            Unused({"b": "vocabulary"}, b=nn.Embedding(4, 2, padding_idx=1)),
            2,
            "b has max_norm, .* or padding_idx",
            "leave it whole",
        ),
        (
            tied_to_a_whole_layer(),
            2,
            "tokens and head share one weight, but .* divides it in two ways",
            "the same way for both",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(model: nn.Module, parts: int, what: str, fix: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        resolve(model, plan_of(model, "parallel.tensor"), parts, "parallel.tensor")
    assert caught.value.fix and re.search(fix, caught.value.fix), caught.value.fix
    assert "parallel.tensor" in str(caught.value)


class Stray(nn.Module):
    """With a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))


@pytest.mark.parametrize(
    ("model", "what", "fix"),
    [
        (
            mlp.build("mlp", (2, 2, 1), 3, widths=(6,)),
            r'tensor_plan\(\) of MLP marks no layer as "sequence"',
            "=false; or a plan like the one of",
        ),
        (
            Unused({"a": "rows", "b": "sequence"}, a=nn.Linear(2, 2), b=nn.BatchNorm1d(2)),
            "b is a BatchNorm1d, whose statistics",
            "LayerNorm",
        ),
        (
            Unused(
                {"a": "rows", "b": "sequence"},
                a=nn.Linear(2, 2),
                b=nn.Embedding(4, 2, padding_idx=1),
            ),
            "cut by sequence",
            "leave it whole",
        ),
        (
            Unused({"m.a": "rows", "n": "sequence"}, m=Stray(), n=nn.LayerNorm(2)),
            "does not mention m.scale, which",
            '"m": "sequence"',
        ),
        (
            Unused(
                {"a": "rows", "c": "sequence"}, a=nn.Linear(2, 2), b=nn.LayerNorm(2), c=nn.Dropout()
            ),
            "b.weight, which",
            '"b": "seq',
        ),
    ],
)
def test_a_plan_without_parts_of_the_positions_is_refused(
    model: nn.Module, what: str, fix: str
) -> None:
    plan = plan_of(model, "parallel.tensor")
    with pytest.raises(UserError, match=what) as caught:
        resolve(model, plan, 2, "parallel.tensor", sequence=True)
    assert caught.value.fix and re.search(fix, caught.value.fix), caught.value.fix


def test_one_rank_has_the_whole_model() -> None:
    torch.manual_seed(1)
    model = small_gpt(tied=True)
    whole = small_gpt(tied=True)
    whole.load_state_dict(model.state_dict())
    names = list(model.state_dict())
    cuts = cut_model(model, plan_of(model, ""), SingleProcessCommunicator())
    assert list(model.state_dict()) == names and model.head.weight is model.tokens.weight
    assert {name for name, p in model.named_parameters() if p in cuts} == {
        "tokens.weight",
        *(
            f"blocks.0.{layer}"
            for layer in (
                "attention.inputs.weight",
                "attention.inputs.bias",
                "attention.output.weight",
            )
        ),
        *(f"blocks.0.{layer}" for layer in ("fc1.weight", "fc1.bias", "fc2.weight")),
    }
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(model(tokens).whole(), whole(tokens))


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_of_split_logits_is_that_of_torch(smoothing: float) -> None:
    torch.manual_seed(2)
    logits = (50 * torch.randn(4, 3, 7, dtype=torch.float64)).requires_grad_()
    targets = torch.randint(7, (4, 3))
    targets[1, 2] = -100
    found = SplitLogits(
        logits, TensorParallelLink(SingleProcessCommunicator(), "head"), VocabularyRange(0, 7)
    ).cross_entropy(targets, smoothing, -100)
    expected = functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="none", label_smoothing=smoothing
    )
    assert found.shape == (4, 3) and (found.flatten() - expected).abs().max() < 1e-12
    weights = torch.randn(4, 3, dtype=torch.float64)
    mine, theirs = (
        torch.autograd.grad((loss.view(4, 3) * weights).sum(), logits)[0]
        for loss in (found, expected)
    )
    assert (mine - theirs).abs().max() < 1e-12
