"""Arrays of a weights file that the model has no place for: adapters are merged, prefixes left out,
what changes the others is an error."""

from __future__ import annotations

import copy
import json
import math
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
from hvdtrain.errors import UserError
from hvdtrain.extras.pretrained.torch_file import read_state_dict

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(40, 5))
DATA = {"train_data": {"x": X, "y": X.sum(1) > 0}, "val_data": {"x": X, "y": X.sum(1) > 0}}
JOB = [
    "batch.size=40",
    "speed.precision=fp64",
    "task.standardize=false",
    "optim.name=sgd",
    "optim.momentum=0",
    "log.display=lines",
]
NET = ["model.name=mlp", "model.widths=[6]"]


class Net(nn.Module):
    """A layer with and one without a bias, and a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return y


def train(run: Path, *words: str, **given: Any) -> Any:
    return hvdtrain.train({"run": str(run)}, *JOB, *words, **DATA, **given)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run with adapters on both layers of a net."""
    folder = tmp_path_factory.mktemp("adapted")
    train(folder / "base", *NET, "stop.steps=1", "optim.base_lr=0.1")
    lora = [
        f"model.weights={folder / 'base'}",
        "model.lora=['*']",
        "model.lora_rank=2",
        "model.lora_alpha=3",
    ]
    return train(folder / "run", *NET, *lora, "stop.steps=20", "optim.base_lr=0.5")


@needs_extra("trained_models")
def test_adapters_of_a_run_are_merged(
    adapted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plain job, and one with other adapters, begin with the function of the run; one with the
    same adapters trains them further."""
    expected = hvdtrain.predict(adapted, X)
    steps = ["stop.steps=1", "optim.base_lr=0", f"model.weights={adapted.folder}"]
    plain = train(tmp_path / "plain", *NET, *steps)
    assert (
        "the adapters of 2 layers are merged into their weights: W + 1.5 B A"
        in capsys.readouterr().out
    )
    assert set(plain.weights) == {"fc1.weight", "fc1.bias", "head.weight", "head.bias"}
    others = train(tmp_path / "others", *NET, *steps, "model.lora=['fc1']", "model.lora_rank=1")
    assert "merged into their weights" in capsys.readouterr().out
    scaled = train(
        tmp_path / "scaled",
        *NET,
        *steps,
        "model.lora=['*']",
        "model.lora_rank=2",
        "model.lora_alpha=1",
    )
    same = train(
        tmp_path / "same",
        *NET,
        *steps,
        "model.lora=['*']",
        "model.lora_rank=2",
        "model.lora_alpha=3",
    )
    assert "the adapters of 2 layers are trained further" in capsys.readouterr().out
    assert (
        np.array_equal(same.weights["fc1.lora_B"], adapted.weights["fc1.lora_B"])
        and np.abs(adapted.weights["fc1.lora_B"]).max() > 0.1
    )
    for run in (plain, others, scaled, same):
        np.testing.assert_allclose(hvdtrain.predict(run, X), expected, rtol=0, atol=1e-12)


class Encoder(nn.Module):
    """Layers of torch.nn.TransformerEncoder, which take a fast path in evaluation; with padding
    also nested tensors."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(4, 2)
        self.padded = padded

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = torch.sin(x.unsqueeze(2) * torch.arange(1, 5, dtype=x.dtype))
        padding = torch.zeros(x.shape, dtype=torch.bool)
        padding[:, -1] = x[:, 0] > 0
        encoded = self.encoder(steps, src_key_padding_mask=padding if self.padded else None)
        y: torch.Tensor = self.head(encoded[:, 0])
        return y


@needs_extra("trained_models")
@pytest.mark.parametrize("padded", [False, True])
def test_evaluation_sees_the_adapters_of_an_encoder(padded: bool, tmp_path: Path) -> None:
    net = Encoder(padded).double()
    lora = ["model.lora=['*linear1','*linear2']", "model.lora_rank=2"]
    run = train(tmp_path / "run", *lora, "epochs=4", "optim.base_lr=1", model=net)
    x = torch.from_numpy(X)
    expected = net.train()(x)  # its adapters are merged; without dropout, and with no fast path
    before = Encoder(padded).double().train()(x)
    assert (expected - before).abs().max() > 0.01
    loss = nn.functional.cross_entropy(expected, torch.from_numpy(DATA["val_data"]["y"]).long())
    events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
    seen = [event["val_loss"] for event in events if "val_loss" in event]
    assert seen[-1] == pytest.approx(loss.item(), abs=1e-10)
    assert hvdtrain.evaluate(run, DATA["val_data"])["loss"] == pytest.approx(loss.item(), abs=1e-10)
    found = hvdtrain.predict(run, X)
    np.testing.assert_allclose(found, expected.detach(), rtol=0, atol=1e-10)


@needs_extra("export")
@needs_extra("trained_models")
def test_export_of_adapters_is_merged_or_an_error(
    adapted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "w.safetensors"
    assert main(["export", str(adapted.folder), "--to", str(file)]) == 2
    assert (
        "has adapters (model.lora); its weights without them are a different model"
        in capsys.readouterr().err
        and not file.exists()
    )
    assert main(["export", str(adapted.folder), "--to", str(file), "--merged"]) == 0
    run = train(tmp_path / "run", *NET, "stop.steps=1", "optim.base_lr=0", f"model.weights={file}")
    np.testing.assert_allclose(
        hvdtrain.predict(run, X), hvdtrain.predict(adapted, X), rtol=0, atol=1e-12
    )


def state(**change: Any) -> dict[str, np.ndarray]:
    return {name: tensor.numpy().copy() for name, tensor in Net().state_dict().items()} | {
        name.replace("__", "."): array for name, array in change.items()
    }


ONES = np.ones(4)


@pytest.mark.parametrize(
    ("arrays", "what", "fix"),
    [
        (
            state(last__lora_A=ONES, last__lora_B=ONES),
            "last.lora_A, an adapter without its scale",
            "export RUN --to FILE --merged",
        ),
        (
            state(**{"last__lora_A__default__weight": ONES}),
            "an adapter of peft",
            "merge_and_unload()",
        ),
        (
            {
                f"base_model.model.{name}": a
                for name, a in state(last__base_layer__weight=ONES).items()
            },
            "no array of",
            "weights_names",
        ),
        (
            state(first__weight_g=ONES),
            "first.weight_g, a part of a parametrized weight",
            "remove_parametrizations",
        ),
        (
            state(last__parametrizations__weight__original0=ONES),
            "a part of a parametrized weight",
            "remove_parametrizations",
        ),
        (state(last__weight_mask=ONES), "the mask of a pruned weight", "prune.remove"),
        (
            state(last__weight_scale=ONES),
            "last.weight_scale, a part of a quantized weight",
            "not quantized",
        ),
        (state(last__SCB=np.ones(4, np.int8)), "a part of a quantized weight", "not quantized"),
        (
            state(first__running_mean=ONES),
            "a running statistic of a batch norm",
            "the batch norm of the file",
        ),
        (
            state(first__bias=ONES),
            "contains first.bias, but the model has only the other weights of first",
            "unused.first.bias",
        ),
        (
            state(ema__last__weight=ONES),
            "contains both ema.last.weight and last.weight: averages",
            "one of them",
        ),
        (
            {n: a for n, a in state().items() if n != "norm.running_var"},
            "but not norm.running_var",
            "model.weights_skip=['norm.running_var']",
        ),
        (
            {n: a for n, a in state().items() if n != "last.bias"},
            "contains weights of last, but not last.bias",
            "model.weights_skip=['last.bias']",
        ),
    ],
)
def test_what_changes_the_others(
    arrays: dict[str, np.ndarray], what: str, fix: str, tmp_path: Path
) -> None:
    save_file(arrays, tmp_path / "w.safetensors")
    with pytest.raises(UserError) as caught:
        train(tmp_path / "run", f"model.weights={tmp_path / 'w.safetensors'}", model=Net().double())
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)


@pytest.mark.parametrize(
    ("arrays", "words", "said"),
    [
        (
            {f"_orig_mod.module.{name}": a for name, a in state().items()},
            [],
            "names of the file have _orig_mod. and module., which is left out",
        ),
        (
            {f"module.{name}": a for name, a in state().items()} | {"n_averaged": np.array(3)},
            [],
            "begin with module., which is left out",
        ),
        (
            {name.replace("last.", "last._orig_mod."): a for name, a in state().items()},
            [],
            "names of the file have _orig_mod.",
        ),
        (
            {n: a for n, a in state().items() if "tracked" not in n}
            | {"gone.weight": ONES, "gone.weight_g": ONES},
            [],
            "gone.weight",
        ),
        (
            state(first__bias=ONES),
            ["model.weights_names=['first.bias=unused.first.bias']"],
            "unused.first.bias",
        ),
        (
            {n: a for n, a in state().items() if n != "last.bias"},
            ["model.weights_skip=['last.bias']"],
            "by model.weights_skip: last.bias",
        ),
    ],
)
def test_what_changes_nothing(
    arrays: dict[str, np.ndarray],
    words: list[str],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    save_file(arrays, tmp_path / "w.safetensors")
    net = Net().double()
    with torch.no_grad():
        [p.zero_() for p in net.parameters()]
    words = [*words, "stop.steps=1", "optim.base_lr=0", "model.freeze=['norm*']"]
    train(tmp_path / "run", f"model.weights={tmp_path / 'w.safetensors'}", *words, model=net)
    assert said in capsys.readouterr().out
    assert all(
        torch.equal(net.state_dict()[name].float(), Net().state_dict()[name])
        for name in ("first.weight", "norm.weight", "last.weight")
    )


def test_a_file_with_averages_beside_the_weights(tmp_path: Path) -> None:
    both = {"state_dict": Net().state_dict(), "state_dict_ema": Net().state_dict()}
    torch.save(both, tmp_path / "w.pt")
    with pytest.raises(
        UserError,
        match="contains weights under 'state_dict' and averages of them under 'state_dict_ema'",
    ):
        train(tmp_path / "run", f"model.weights={tmp_path / 'w.pt'}", model=Net().double())


@pytest.mark.parametrize("name", ["ema_config", "schemata"])
def test_a_file_with_settings_beside_the_weights(name: str, tmp_path: Path) -> None:
    settings = {"decay": 0.9, "every": torch.tensor(2)}
    torch.save({"model": Net().state_dict(), name: settings}, tmp_path / "w.pt")
    found = read_state_dict(tmp_path / "w.pt", ["model"], "model.weights").arrays
    assert found.keys() == Net().state_dict().keys()
    inner = {"module." + key: tensor for key, tensor in Net().state_dict().items()}
    torch.save({"model": Net().state_dict(), name: {"shadow": inner}}, tmp_path / "w.pt")
    with pytest.raises(UserError, match=f"averages of them under '{name}'") as caught:
        read_state_dict(tmp_path / "w.pt", ["model"], "model.weights")
    assert caught.value.fix.endswith(f"the other is torch.load(FILE)['{name}']['shadow']")


def test_a_file_with_two_sets_of_weights(tmp_path: Path) -> None:
    """Two that differ are an error that names both; of the same ones one is taken, and a line says
    what else the file has. An optimizer's state is not a set."""
    path = tmp_path / "w.pt"
    first = Net().state_dict()
    other = {name: tensor + 1 for name, tensor in first.items()}
    names = ["state_dict", "model"]
    for second in ("model", "best"):
        torch.save({second: other, "state_dict": first}, path)
        with pytest.raises(
            UserError,
            match=f"contains weights under 'state_dict' and other weights under '{second}'",
        ) as caught:
            read_state_dict(path, names, "model.weights")
        assert caught.value.fix == (
            "torch.save(torch.load(FILE)['state_dict'], 'weights.pt') keeps one of them; the "
            f"other is torch.load(FILE)['{second}']"
        )
    torch.save({"state_dict": first} | other, path)
    with pytest.raises(UserError, match="and others with the same names next to it"):
        read_state_dict(path, names, "model.weights")
    beside = {"optimizer": {"momentum": other}, "head": {"0.weight": torch.ones(2)}}
    torch.save({"model": first, "state_dict": first, "epoch": 3, **beside}, path)
    found = read_state_dict(path, names, "model.weights")
    assert found.lines == [
        f"weights {path}: taken is 'state_dict', beside 'model', which is the same, 'head'"
    ]
    torch.save({"state_dict": {"depth": 3}, "model": first}, path)
    assert read_state_dict(path, names, "model.weights").arrays.keys() == first.keys()


def test_what_is_not_a_second_set_of_weights(tmp_path: Path) -> None:
    """Tensors of other names or other shapes, and the same bytes, as those of NaN."""
    path = tmp_path / "w.pt"
    first = Net().state_dict()
    linear = nn.Linear(3, 2).state_dict()
    missing = {"a.weight": torch.tensor([math.nan, -0.0]), "a.count": torch.tensor(3)}
    alike = ", which is the same"
    for weights, second, value, said in (
        (first, "model", {"pixel_mean": torch.ones(3)}, ""),
        (linear, "normalizer", nn.Linear(5, 4).state_dict(), ""),
        (missing, "best", copy.deepcopy(missing), alike),
        ({"t": torch.ones(2, 3).T}, "model", {"t": torch.ones(3, 2)}, alike),
    ):
        torch.save({"state_dict": weights, second: value}, path)
        found = read_state_dict(path, ["state_dict", "model"], "model.weights")
        assert found.arrays.keys() == weights.keys()
        assert found.lines == [f"weights {path}: taken is 'state_dict', beside '{second}'{said}"]
    huge = torch.zeros(1).expand(2**40)
    strange = [torch.ones(2).to(torch.float8_e4m3fn), torch.eye(2).to_sparse(), huge]
    for tensor in strange:
        torch.save({"model": {"a.weight": tensor}, "best": {"a.weight": tensor}}, path)
        with pytest.raises(
            UserError, match="other weights under 'best'|has type torch.float8_e4m3fn"
        ):
            read_state_dict(path, ["model"], "model.weights")


def test_a_folder_of_peft(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4}))
    save_file({"base_model.model.last.lora_A.weight": ONES}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(
        UserError, match="contains a peft adapter without the weights that it belongs to"
    ) as caught:
        train(tmp_path / "run", f"model.weights={tmp_path}", model=Net().double())
    assert "merge_and_unload()" in caught.value.fix


class Adapted(nn.Module):
    """A model whose own parameters have the names of adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 2)
        self.fc.lora_A = nn.Parameter(torch.ones(1, 5))
        self.fc.lora_B = nn.Parameter(torch.ones(2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.fc(x) + x @ self.fc.lora_A.T @ self.fc.lora_B.T
        return y


@needs_extra("export")
def test_parameters_with_the_names_of_adapters_are_a_models_own(tmp_path: Path) -> None:
    """They are trained, given back, exported and loaded as they are."""
    net = Adapted().double()
    run = train(tmp_path / "run", "stop.steps=3", "optim.base_lr=0.1", model=net)
    assert not torch.equal(net.fc.lora_A, torch.ones(1, 5, dtype=torch.float64))
    assert main(["export", str(run.folder), "--to", str(tmp_path / "w.safetensors")]) == 0
    for weights in (tmp_path / "w.safetensors", run.folder):
        again = Adapted().double()
        words = ["stop.steps=1", "optim.base_lr=0", f"model.weights={weights}"]
        train(tmp_path / f"again-{weights.name}", *words, model=again)
        assert all(
            torch.equal(again.state_dict()[name], tensor)
            for name, tensor in net.state_dict().items()
        )


def test_what_is_trained_beside_adapters(
    adapted: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing; what model.lora_train names; what model.weights_skip initializes again. A weight
    that the file lacks is not frozen in silence."""
    weights = f"model.weights={adapted.folder}"
    lora = ["model.lora=['fc1']", "model.lora_rank=1"]
    for words, trained in (
        ([], set[str]()),
        (["model.lora_train=['*.bias']"], {"head.bias"}),  # not that of fc1
        (["model.weights_skip=['head.*']"], {"head.weight", "head.bias"}),
        (["model.freeze=['head.bias']", "model.lora_train=['head.*']"], {"head.weight"}),
    ):
        steps = ["stop.steps=2", "optim.base_lr=0.5", weights]
        runs = [
            train(
                tmp_path / f"{len(words)}-{len(trained)}-{rate}",
                *NET,
                *lora,
                *words,
                *steps,
                f"optim.base_lr={rate}",
            )
            for rate in (0, 1)
        ]
        moved = {
            name
            for name in runs[0].weights
            if not np.array_equal(runs[0].weights[name], runs[1].weights[name])
        }
        assert moved == trained | {"fc1.lora_A", "fc1.lora_B"}
        beside = f", and {', '.join(sorted(trained, reverse=True))}" if trained else ""
        assert (
            f"trained are the adapters of 1 layers{beside}; all other weights"
            in capsys.readouterr().out
        )
    for words, what in (
        (
            ["model.lora_train=['fc1.*']"],
            "model.lora_train: fc1.* matches no weight that could be trained",
        ),
        (
            ["model.weights_skip=['fc1.*']"],
            (
                "model.weights_skip leaves fc1.weight at its random initial values, but model.lora "
                "or model.freeze freezes it"
            ),
        ),
    ):
        with pytest.raises(UserError) as caught:
            train(tmp_path / "no", *NET, *lora, *words, weights)
        assert what in caught.value.what, str(caught.value)
    save_file(
        {
            name: array
            for name, array in runs[0].weights.items()
            if name.startswith("fc1.w") or name == "fc1.bias"
        },
        tmp_path / "w.safetensors",
    )
    with pytest.raises(
        UserError,
        match="head.weight is not in .*, but model.lora freezes it at its random initial values",
    ) as caught:
        train(tmp_path / "no", *NET, *lora, f"model.weights={tmp_path / 'w.safetensors'}")
    assert "model.weights_skip=['head.*'] trains that layer" in caught.value.fix


def test_running_statistics_beside_adapters_stay(tmp_path: Path) -> None:
    for words, moves in (([], False), (["model.lora_train=['norm*']"], True)):
        net = Net().double()
        train(
            tmp_path / f"{moves}",
            "stop.steps=2",
            "optim.base_lr=0.1",
            "model.lora=['last']",
            "model.lora_rank=1",
            *words,
            model=net,
        )
        assert (
            not torch.equal(net.norm.running_mean, torch.zeros(4, dtype=torch.float64))
        ) is moves  # type: ignore[arg-type]
        assert torch.equal(net.norm.weight, torch.ones(4, dtype=torch.float64)) is not moves


def test_a_run_from_before_lora_train_keeps_its_meaning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config.yaml lacks the key: all but the layers with adapters were trained."""
    words = [*NET, "model.lora=['fc1']", "model.lora_rank=1", "optim.base_lr=0.1"]
    straight = train(tmp_path / "straight", *words, "model.lora_train=['*']", "stop.steps=4")
    old = train(tmp_path / "old", *words, "model.lora_train=['*']", "stop.steps=2")
    config = old.folder / "config.yaml"
    config.write_text(config.read_text().replace("  lora_train:\n  - '*'\n", ""))
    assert "lora_train" not in config.read_text()
    with pytest.raises(UserError, match=r"model.lora_train is \['\*'\] there, \[\] here"):
        train(old.folder, *words, "stop.steps=4")
    resumed = hvdtrain.train(
        f"resume={old.folder}", "stop.steps=4", f"run={tmp_path / 'new'}", **DATA
    )
    assert all(
        np.array_equal(array, straight.weights[name]) for name, array in resumed.weights.items()
    )
