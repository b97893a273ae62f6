"""model.recompute: the same gradients to the last bit, the same buffers, and fewer activations that
are kept."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.models import gpt, resnet, wide_resnet
from hvdtrain.frameworks.torch.recompute import recompute_blocks
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.conflicts import refuse_conflicts

TASK = Classification((4, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model in float64 with dropout where it has some, and its input."""
    torch.manual_seed(1)
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    if name == "gpt":
        options: dict[str, Any] = {
            "embedding_dropout": 0.1,
            "attention_dropout": 0.2,
            "residual_dropout": 0.3,
        }
        return gpt.build(
            "gpt", 10, 7, layers=5, heads=2, width=8, **options
        ).double(), torch.randint(7, (4, 10))
    if name == "wide_resnet":
        return wide_resnet.build(
            name, (8, 8, 3), 5, widths=(4, 4, 8, 8), dropout=0.05
        ).double(), images
    return resnet.build(name, (8, 8, 3), 5, small_images=True).double(), images


def train_once(model: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients and buffers after two passes that add up, as of two micro-batches."""
    torch.manual_seed(2)
    for part in x.split(2):
        model(part).square().sum().backward()
    return {f"p.{name}": p.grad for name, p in model.named_parameters()} | {
        f"b.{name}": b for name, b in model.named_buffers()
    }


@pytest.mark.parametrize(
    ("name", "which"), [("gpt", "all"), ("gpt", 2), ("wide_resnet", "all"), ("resnet18", 3)]
)
def test_gradients_and_buffers_are_the_same_to_the_last_bit(name: str, which: Any) -> None:
    plain = train_once(*make(name))
    model, x = make(name)
    recompute_blocks(model, which, "here")
    again = train_once(model, x)
    assert again.keys() == plain.keys() and any("running_mean" in name for name in plain) == (
        name != "gpt"
    )
    for key, value in plain.items():
        assert value is not None and torch.equal(again[key], value), key


class Counted(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.fc(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Counted() for _ in range(5)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x)


@pytest.mark.parametrize(
    ("which", "calls"),
    [("none", [1, 1, 1, 1, 1]), ("all", [2] * 5), (2, [1, 2, 1, 2, 1]), (3, [1, 1, 2, 1, 1])],
)
def test_every_n_th_block_is_computed_twice(which: Any, calls: list[int]) -> None:
    model = Model()
    names = list(model.state_dict())
    recompute_blocks(model, which, "here")
    model(torch.randn(2, 3)).sum().backward()
    assert [block.calls for block in model.blocks] == calls
    assert list(model.state_dict()) == names
    with torch.no_grad():
        model(torch.randn(2, 3))
    model.eval()(torch.randn(2, 3)).sum().backward()
    assert [block.calls for block in model.blocks] == [count + 2 for count in calls]


def test_fewer_tensors_are_kept_for_the_backward_pass() -> None:
    kept: dict[str, int] = {}
    for which in ("none", "all"):
        model, x = make("gpt")
        recompute_blocks(model, which, "here")  # type: ignore[arg-type]
        sizes: list[int] = []

        def count(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(x)
        kept[which] = sum(sizes)
    assert kept["all"] < kept["none"] / 4


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="Linear has no attribute `blocks`"):
        recompute_blocks(nn.Linear(2, 2), "all", "here")


@pytest.mark.parametrize(
    "words",
    [["norm.kind=sync"], ["speed.compile=default"], ["framework=numpy", "model.name=linear"]],
)
def test_what_excludes_it(words: list[str]) -> None:
    with pytest.raises(UserError, match="model.recompute=2"):
        refuse_conflicts(configure(None, ["model.recompute=2", *words]), "mpi", 2)


@pytest.mark.in_turn
@pytest.mark.parametrize(("name", "which"), [("mlp", 2), ("convnet", "all")])
def test_jax_moves_alike(name: str, which: Any) -> None:
    rng = np.random.default_rng(1)
    batches = [
        {"x": rng.integers(0, 256, (8, 4, 4, 2), dtype=np.uint8), "y": rng.integers(0, 3, 8)}
        for _ in range(3)
    ]
    states = []
    for recompute in ("none", which):
        words = [
            "framework=jax",
            "speed.precision=fp64",
            f"model.name={name}",
            "model.widths=[8,8,8]",
            f"model.recompute={recompute}",
        ]
        learner = build_learner(configure(None, words), TASK, SingleProcessCommunicator())
        for step, batch in enumerate(batches):
            learner.step(
                [learner.to_device(batch)],
                Hyper(lr=0.1, momentum=0.9, weight_decay=0.01, batch=8),
                step,
            )
        states.append(learner.state())
        with learner.target.enable_x64():  # type: ignore[attr-defined]
            program = jax.make_jaxpr(learner.model.outputs)(
                learner.weights, learner.buffers, np.zeros((1, 4, 4, 2))
            )  # type: ignore[attr-defined]
        assert str(program).count("remat") == {"none": 0, "2": 1, "all": 3}[f"{recompute}"]
    for key, value in states[0].items():
        assert np.array_equal(states[1][key], value), key


def test_jax_refuses_a_model_without_blocks() -> None:
    config = configure(None, ["framework=jax", "model.name=linear", "model.recompute=all"])
    with pytest.raises(
        UserError, match="the function of model.name=linear has no parameter `wrap`"
    ):
        build_learner(config, TASK, SingleProcessCommunicator())
