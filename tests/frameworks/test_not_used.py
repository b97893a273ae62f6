"""What a user's torch model has that a job does not use is a line of the header, and the model
stays as it is."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ranks import needs_extra
from torch import nn

import hvdtrain
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.given import given_model, with_given
from hvdtrain.training.header import _drops

TASK = Classification((4,), 2, np.array([0.0]), np.array([1.0]), dtype="float32")
NO_GRADIENT = "which the loss does not depend on; no gradient for aux.weight, aux.bias"


class Net(nn.Module):
    """A body, a norm, and an auxiliary head in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.head = nn.Linear(8, 2)
        self.aux = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.body(x)
        return (
            self.outputs(self.head(hidden), self.aux(hidden))
            if self.training
            else self.head(hidden)
        )

    def outputs(self, main: torch.Tensor, aux: torch.Tensor) -> Any:
        return {"out": main, "aux": aux}


class InTuple(Net):
    def outputs(self, main: torch.Tensor, aux: torch.Tensor) -> Any:
        return main, None, [aux]


class Named(NamedTuple):
    logits: torch.Tensor
    second: torch.Tensor | None
    first: torch.Tensor


class InNamedTuple(Net):
    def outputs(self, main: torch.Tensor, aux: torch.Tensor) -> Any:
        return Named(main, None, aux)


class OneOutput(Net):
    def outputs(self, main: torch.Tensor, aux: torch.Tensor) -> Any:
        return main + aux


class ForOthers(OneOutput):
    """With methods and marks of other trainers and optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight._no_weight_decay = True  # type: ignore[assignment]

    def no_weight_decay(self) -> set[str]:
        return {"body.0.weight", "head.bias"}

    def training_step(self, batch: Any, number: int) -> None: ...


def notes_of(net: nn.Module, *words: str) -> list[str]:
    given = given_model(net)
    config = with_given(
        configure(None, ["speed.device=cpu", f"model.name={given.name}", *words]), {"model": given}
    )
    learner: Any = build_learner(config, TASK, SingleProcessCommunicator())
    for name, array in learner.model.state_dict().items():
        assert torch.equal(array, net.state_dict()[name]), name
    found: list[str] = learner.notes
    return found


@pytest.mark.parametrize(
    ("net", "lines"),
    [
        (Net(), [f"not used: output aux, {NO_GRADIENT}"]),
        (InTuple(), [f"not used: output 2.0, {NO_GRADIENT}"]),
        (InNamedTuple(), [f"not used: output first, {NO_GRADIENT}"]),
        (OneOutput(), []),
        (
            ForOthers(),
            [
                "not used: training_step() of ForOthers",
                "not used: no_weight_decay of body.0.weight, head.weight, which "
                "optim.weight_decay=0.1 decays: "
                "optim.groups=[{names: body.0.weight, decay: 0}]",
            ],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_used_of_a_model_is_a_line(net: nn.Module, lines: list[str]) -> None:
    assert notes_of(net, "optim.weight_decay=0.1") == lines


class Ends(OneOutput):
    """With an operation behind its outputs."""

    def __init__(self, last: Any, drop: bool = False) -> None:
        super().__init__()
        self.last = last
        self.takes_none = not drop

    def forward(self, x: torch.Tensor) -> Any:
        assert self.takes_none or len(x)
        return self.last(super().forward(x))


@pytest.mark.parametrize("drop", [False, True])
def test_a_softmax_that_the_loss_applies_again_is_a_line(drop: bool) -> None:
    """Of a module or a function, whether the model takes a pass without samples or not."""
    line = (
        "the model ends in a softmax, and the loss of task.name=classification applies another "
        "softmax to its outputs: end the model without it"
    )
    for last in (nn.Softmax(1), lambda y: torch.softmax(y, 1)):
        assert notes_of(Ends(last, drop)) == [line]
    assert notes_of(Ends(nn.Softmax(1), drop), "model.loss=squared_error") == []
    for last in (nn.LogSoftmax(1), nn.Sigmoid()):
        assert notes_of(Ends(last, drop)) == []


@pytest.mark.parametrize(
    "method",
    [
        lambda self: None,
        lambda self: 3,
        lambda self: "head.bias",
        lambda self: [["head.bias"]],
        lambda self, skip: {skip},
    ],
)
def test_a_no_weight_decay_of_another_kind_ends_no_job(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneOutput, "no_weight_decay", method, raising=False)
    assert notes_of(OneOutput(), "optim.weight_decay=0.1") == []


def test_the_header_has_the_line(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    data = {"x": np.ones((8, 4), np.float32), "y": np.arange(8) % 2}
    hvdtrain.train(
        "batch.size=8",
        "stop.steps=1",
        f"run={tmp_path}/run",
        model=Net(),
        train_data=data,
        val_data=data,
    )
    assert f"        not used: output aux, {NO_GRADIENT}\n" in capsys.readouterr().out


def test_a_hook_of_a_gradient_works_on_the_copy(tmp_path: Any) -> None:
    """It keeps a row of the weights as they are."""
    data = {"x": np.ones((8, 4), np.float32), "y": np.arange(8) % 2}
    net = nn.Linear(4, 2)
    net.weight.register_hook(lambda g: g * torch.tensor([[0.0], [1.0]]))
    before = net.weight.detach().clone()
    words = [
        "batch.size=8",
        "stop.steps=2",
        "optim.base_lr=1",
        "task.standardize=false",
        f"run={tmp_path}/run",
    ]
    data["y"][:6] = 0
    hvdtrain.train(*words, model=net, train_data=data, val_data=data)
    assert torch.equal(net.weight[0], before[0]) and not torch.equal(net.weight[1], before[1])


@needs_extra("fully_sharded")
def test_a_hook_of_a_gradient_that_is_in_parts_is_refused() -> None:
    net = nn.Linear(4, 2)
    net.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(
        hvdtrain.UserError,
        match=r"the model registers a gradient hook on weight, but shard\.stage divides it",
    ):
        notes_of(net, "shard.stage=3")


def test_a_wrapped_model_is_refused() -> None:
    with pytest.raises(
        hvdtrain.UserError,
        match=r"wrapped in DataParallel, but hvdtrain distributes samples.*\n.*\n.*model\.module",
    ):
        notes_of(nn.DataParallel(OneOutput()))


def test_a_loss_with_weights_is_refused(tmp_path: Any) -> None:
    """Those of the script's model too, of which a copy is trained."""
    data = {"x": np.ones((8, 4), np.float32), "y": np.arange(8) % 2}
    net = OneOutput()

    def penalized(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return (
            nn.functional.cross_entropy(outputs, batch["y"], reduction="none")
            + net.head.weight.square().sum()
        )

    with pytest.raises(
        hvdtrain.UserError, match="the loss has a gradient for other tensors than the outputs"
    ):
        hvdtrain.train(
            "batch.size=8",
            "stop.steps=1",
            f"run={tmp_path}/run",
            model=net,
            loss=penalized,
            train_data=data,
            val_data=data,
        )


@pytest.mark.parametrize("p", [None, "0.5", torch.tensor([0.5, 0.5])])
def test_a_dropout_with_another_p_ends_no_job(p: Any) -> None:
    class DropoutOfTheUser(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = p

    assert not _drops(nn.Sequential(DropoutOfTheUser()))
    assert _drops(nn.Sequential(DropoutOfTheUser(), nn.Dropout(0.5)))
    assert not _drops(nn.Sequential(nn.Dropout(0.0)))
