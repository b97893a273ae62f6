"""Tied weights: what a key takes by one name of an array holds for its other names, or is an error
that names both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import needs_extra
from safetensors.numpy import save_file
from torch import nn

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.core.adapters import merged
from hvdtrain.core.ties import Ties
from hvdtrain.data.source import NamedArrays
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.frozen import check_overlaps


class Tied(nn.Module):
    """An embedding, whose weight is the head's too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(12, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(torch.tanh(self.mid(self.embed(x)))).transpose(1, 2)
        return y


X = np.random.default_rng(0).integers(0, 12, (24, 5))
DATA = {"x": X, "y": (X * 3 + 1) % 12}
WORDS = [
    "epochs=4",
    "batch.size=24",
    "speed.precision=fp64",
    "optim.name=sgd",
    "optim.base_lr=0.5",
    "optim.momentum=0",
    "log.display=lines",
]


def train(folder: Path, *words: str, net: nn.Module | None = None) -> tuple[nn.Module, Any]:
    net = Tied().double() if net is None else net
    given = {"model": net, "loss": nn.CrossEntropyLoss(), "train_data": DATA, "val_data": DATA}
    return net, hvdtrain.train({"run": str(folder / "run")}, *WORDS, *words, **given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["model.freeze=['head.weight']"],
            "model.freeze: head.weight is embed.weight too (tied weights)",
        ),
        (
            ["optim.groups=[{names: 'embed.*', rate: 0}]"],
            "optim.groups[0]: embed.weight is head.weight too (tied weights)",
        ),
        pytest.param(
            ["model.lora=['mid']", "model.lora_rank=1", "model.lora_train=['head.*']"],
            "model.lora_train: ",
            marks=needs_extra("pretrained"),
        ),
        *(
            (
                [f"model.freeze=['{name}.weight']", f"model.thaw=[{{at: 2, names: {names}}}]"],
                f"model.freeze: {name}.weight is {other}.weight too (tied weights)",
            )
            for name, other, names in (
                ("embed", "head", "['embed*','head*']"),
                ("head", "embed", "['*']"),
            )
        ),
    ],
)
def test_a_name_holds_for_both(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Against plain torch, four steps of all samples; thawed weights are trained in the last
    two."""
    net, _ = train(tmp_path, *words)
    out = capsys.readouterr().out
    is_lora = "model.lora=['mid']" in words
    assert said in out or is_lora, out
    if is_lora:
        assert (
            "trained are the adapters of 1 layers, and embed.weight, head.bias; all other weights"
            in out
        )
        assert (
            not torch.equal(net.embed.weight, Tied().double().embed.weight)
            and net.head.weight is net.embed.weight
        )  # type: ignore[union-attr]
        return
    expected = Tied().double()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.5)
    for step in range(4):
        expected.embed.weight.requires_grad_(step >= 2 and "model.thaw" in words[-1])
        optimizer.zero_grad()
        nn.functional.cross_entropy(
            expected(torch.from_numpy(X)), torch.from_numpy(DATA["y"])
        ).backward()
        optimizer.step()
    for name, tensor in expected.state_dict().items():
        np.testing.assert_allclose(
            net.state_dict()[name].numpy(), tensor.numpy(), rtol=0, atol=1e-12, err_msg=name
        )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        pytest.param(
            ["model.lora=['head']"],
            "head.weight is tied to embed.weight, so merging an adapter into it would change both",
            marks=needs_extra("pretrained"),
        ),
        pytest.param(
            ["model.lora=['*']"],
            "head.weight is tied to embed.weight",
            marks=needs_extra("pretrained"),
        ),
        (
            ["optim.groups=[{names: 'head.*', rate: 2}]"],
            "optim.groups[0], head.*, matches head.weight but not embed.weight",
        ),
        (
            ["optim.groups=[{names: 'head.*'}, {names: 'embed.*', rate: 2}]"],
            "matches head.weight but not embed.weight",
        ),
        (
            ["model.freeze=['*']", "model.thaw=[{at: 1, names: ['head.*']}]"],
            "model.thaw[0], names=['head.*'], matches head.weight, but not embed.weight, which "
            "is the same array",
        ),
    ],
)
def test_one_name_of_two_is_an_error(words: list[str], what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        train(tmp_path, *words)
    assert what in caught.value.what, str(caught.value)


@needs_extra("pretrained")
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_tied_head_of_gpt(framework: str, tmp_path: Path) -> None:
    words = [
        f"framework={framework}",
        "model.name=gpt",
        "model.layers=1",
        "model.heads=1",
        "model.width=4",
        "model.tied=true",
    ]
    words += ["task.name=language", "stop.steps=1", "batch.size=4", f"run={tmp_path / 'run'}"]
    tokens = NamedArrays({"tokens": X}, {"tokens": 12})
    data = {"train_data": tokens, "val_data": tokens}
    with pytest.raises(
        UserError, match=r"optim.groups\[0\], head.*, matches head.weight but not tokens.weight"
    ):
        hvdtrain.train(*words, "optim.groups=[{names: 'head*', rate: 2}]", **data)
    if framework == "torch":
        with pytest.raises(
            UserError,
            match="head.weight is tied to tokens.weight, so merging .* would change both",
        ) as caught:
            hvdtrain.train(*words, "model.lora=['head']", **data)
        assert "model.tied=false of gpt" in caught.value.fix


@needs_extra("pretrained")
@pytest.mark.parametrize(
    ("change", "words", "what"),
    [
        (
            {},
            ["model.weights_skip=['head.*']"],
            "model.weights_skip=['head.*'] matches head.weight, but not embed.weight",
        ),
        (
            {"head.weight": np.ones((12, 6))},
            [],
            "embed.weight and head.weight are one array of the model (tied weights), and the file "
            "has two",
        ),
        (
            {"head.weight": np.ones((12, 6))},
            ["model.weights_names=['head.weight=unused.head.weight']"],
            "",
        ),
        ({}, ["model.weights_skip=['head.*','embed.*']"], ""),
    ],
)
def test_weights_of_a_file(
    change: dict[str, Any], words: list[str], what: str, tmp_path: Path
) -> None:
    arrays = {name: tensor.numpy().copy() for name, tensor in Tied().state_dict().items()} | change
    save_file(arrays, tmp_path / "w.safetensors")
    if not what:
        net, _ = train(
            tmp_path, f"model.weights={tmp_path / 'w.safetensors'}", "optim.base_lr=0", *words
        )
        assert torch.equal(net.mid.weight.float(), Tied().mid.weight)  # type: ignore[union-attr]
        return
    with pytest.raises(UserError) as caught:
        train(tmp_path, f"model.weights={tmp_path / 'w.safetensors'}", *words)
    assert what in caught.value.what, str(caught.value)


def test_two_tensors_with_one_memory(tmp_path: Path) -> None:
    net = Tied()
    # a second parameter, of the same numbers
    net.head.weight = nn.Parameter(net.embed.weight.detach())
    with pytest.raises(
        UserError, match="embed.weight and head.weight are two tensors with the same memory"
    ):
        train(tmp_path, "speed.precision=fp32", net=net)
    check_overlaps(Tied(), "model")
    check_overlaps(nn.LSTM(3, 4), "model")
    halves = nn.Module()
    halves.a, halves.b = (nn.Parameter(part) for part in torch.zeros(8).chunk(2))
    check_overlaps(halves, "model")  # neighbours in one storage
    halves.register_buffer("c", halves.a.detach()[1:])
    with pytest.raises(UserError, match="a and c are two tensors with the same memory"):
        check_overlaps(halves, "model")


def test_strided_parts_of_one_storage() -> None:
    """Columns of one array share no element, though their spans meet; what is between two of them
    does."""
    whole = torch.zeros(600, 40, 4)
    net = nn.Module()
    net.a, net.b, net.c = (nn.Parameter(whole[:, :, at : at + 1]) for at in range(3))
    check_overlaps(net, "model")
    net.d = nn.Parameter(whole[:300, :, 3:].transpose(0, 1))
    check_overlaps(net, "model")
    net.e = nn.Parameter(whole.view(torch.int32).view(torch.float32)[300:, 7, 1:3])
    with pytest.raises(UserError, match="[be] and [be] are two tensors with the same memory"):
        check_overlaps(net, "model")


def test_a_merge_keeps_ties() -> None:
    """One layer under two names has one sum; another layer's weight is an error."""
    weight = np.eye(2)
    a = np.ones((1, 2))
    b = np.ones((2, 1))
    both = {
        f"{name}.{key}": array
        for name in ("x", "y")
        for key, array in (("weight", weight), ("lora_A", a), ("lora_B", b))
    }
    found = merged(both, 0.5)
    assert found.keys() == {"x.weight", "y.weight"} and found["x.weight"] is found["y.weight"]
    assert np.array_equal(found["x.weight"], np.eye(2) + 0.5)
    with pytest.raises(UserError, match="x.weight has an adapter and is tied to y.weight"):
        merged({name: array for name, array in both.items() if not name.startswith("y.lora")}, 0.5)
    with pytest.raises(UserError, match="x.lora_A lacks its x.weight"):
        merged({"x.lora_A": a, "x.lora_B": b}, 1.0)


def test_names_of_one_array() -> None:
    ties = Ties({"a": "a", "b": "a", "c": "c"})
    assert (
        ties.spread({"b"}) == {"a", "b"}
        and ties.others("c") == []
        and ties.groups() == [["a", "b"]]
    )
    assert ties.half_fitted(lambda name: name in ("b", "c")) == {"b": ["a"]}


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("model.lora='0'", """"model.lora=['0']\""""),
        ("model.lora=0", """"model.lora=['0']\""""),
        ("model.lora=fc1", "'model.lora=[fc1]'"),
        ("model.freeze='*.bias'", """"model.freeze=['*.bias']\""""),
    ],
)
def test_the_fix_for_one_name_is_a_list_that_is_taken(word: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        configure(None, [word])
    assert caught.value.fix.endswith(fix), caught.value.fix
    configure(None, [fix.strip("\"'") if fix.startswith("'") else fix[1:-1]])


@needs_extra("pretrained")
@needs_extra("export")
def test_export_keeps_two_names_of_one_array(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    net, run = train(
        tmp_path, "model.lora=['mid']", "model.lora_rank=2", "model.lora_train=['head.*','embed.*']"
    )
    assert (
        main(["export", str(run.folder), "--to", str(tmp_path / "w.safetensors"), "--merged"]) == 0
    )
    found = load_file(tmp_path / "w.safetensors")
    assert np.array_equal(found["head.weight"], found["embed.weight"])
    for name, tensor in net.state_dict().items():
        np.testing.assert_allclose(found[name], tensor.numpy(), rtol=0, atol=1e-14, err_msg=name)
