"""model.weights and model.freeze: files of every kind, names and shapes that do not fit; what is
frozen stays as it is, on any ranks."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import alone
from pretrained_on_ranks import FROZEN, JOB, LORA, LORA_WAYS, THAW_WAYS, THAWED, WAYS, thawed_words
from ranks import mpirun, needs_extra, needs_mpirun
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from strange_weights import DATA, ENTRY, safetensors_files, tensors_file, torch_files

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.errors import UserError
from hvdtrain.extras.pretrained.load import read_weights


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, whose weights begin others."""
    run = tmp_path_factory.mktemp("trained") / "run"
    hvdtrain.train({"run": str(run), "stop.steps": 6}, *JOB.split())
    return run


def weights_of(run: Path) -> dict[str, np.ndarray]:
    from hvdtrain.frameworks.learner import plain_names
    from hvdtrain.training.checkpoint.resume import newest_good

    checkpoint, arrays, _ = newest_good(run, 2**40)
    return {name: arrays[own] for name, own in (checkpoint.names or plain_names(arrays)).items()}


def save(kind: str, folder: Path, weights: dict[str, np.ndarray]) -> Path:
    """A file or folder of this kind with the weights, and one that no model has."""
    more: dict[str, Any] = {**weights, "other.weight": np.ones(3)}
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in more.items()}
    path = folder / kind
    if kind == "weights.safetensors":
        save_file(more, path)
    elif kind == "state.pt":
        torch.save(
            {
                "epoch": 3,
                "state_dict": {f"module.{name}": tensor for name, tensor in tensors.items()},
            },
            path,
        )
    elif kind == "plain.bin":
        torch.save(tensors, path)
    else:
        path.mkdir()
        names = sorted(more)
        parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
        for file, own in parts.items():
            save_file({name: more[name] for name in own}, path / file)
        index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


@pytest.mark.parametrize("kind", ["weights.safetensors", "state.pt", "plain.bin", "folder", "run"])
def test_a_new_job_begins_with_them(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = weights_of(trained)
    path = trained if kind == "run" else save(kind, tmp_path, expected)
    run = tmp_path / "new"
    words = [*JOB.split(), "optim.base_lr=0", f"model.weights={path}"]
    hvdtrain.train(
        {"run": str(run), "stop.steps": 1}, *words, "norm.kind=batch", "model.freeze=['norm*']"
    )
    found = weights_of(run)
    said = capsys.readouterr().out
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    assert f"weights {path}: {len(found)} of {len(found)} arrays are loaded" in said
    assert ("1 of the file are not of the model: other.weight" in said) == (kind != "run")
    assert ("begin with module., which is left out" in said) == (kind == "state.pt")


def test_bfloat16_and_prefixes(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16-bit numbers of both kinds of files; names with another beginning; layers that keep their
    first weights."""
    tensors = {
        f"net.{name}": torch.from_numpy(np.array(array))
        for name, array in weights_of(trained).items()
    }
    halves = {
        name: tensor.bfloat16() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }
    save_torch(halves, tmp_path / "half.safetensors")
    torch.save(halves, tmp_path / "half.pt")
    for number, file in enumerate(("half.safetensors", "half.pt")):
        run = tmp_path / f"run-{number}"
        words = [
            f"model.weights={tmp_path / file}",
            "model.weights_names=['net.=']",
            "model.weights_skip=['fc.*']",
            "optim.base_lr=0",
        ]
        hvdtrain.train({"run": str(run), "stop.steps": 1}, *JOB.split(), *words)
        found = weights_of(run)
        for name in ("conv1.weight", "norm2.bias"):
            assert np.array_equal(found[name], halves[f"net.{name}"].double().numpy())
        assert not np.allclose(found["fc.weight"], tensors["net.fc.weight"].numpy())
    assert (
        "2 left as they begin, by model.weights_skip: fc.weight, fc.bias" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("change", "words", "what", "fix"),
    [
        ({"fc.bias": np.ones(10, np.int8)}, [], "is int8, but the model has", "floating-point"),
        ({"fc.bias": np.ones(10, bool)}, [], "is bool, but the model has", "floating-point"),
        ({"fc.bias": np.ones(10, "c8")}, [], "is complex64, but the model has", "floating-point"),
        ({"fc.bias": np.full(10, np.nan)}, [], "has nan, which is not a finite", "diverged"),
        (
            {"fc.bias": np.full(10, 1e300)},
            ["speed.precision=fp32"],
            "has 1e+300, which is not a finite",
            "diverged",
        ),
        (
            {"fc.weight": np.ones((7, 4))},
            [],
            "fc.weight is (7, 4) in ",
            "model.weights_skip=['fc.*'] keeps the layer's",
        ),
        (None, [], "no array of ", "model.weights_names=['OLD=NEW']"),
        (
            {},
            ["model.weights_skip=['head.*']"],
            "model.weights_skip: head.* matches no weight of the model",
            "its first names are conv1",
        ),
        (
            {},
            ["model.weights_names=['encoder.=']"],
            "no array's name begins with 'encoder.'",
            "the first names are ",
        ),
        (
            {},
            ["model.weights_names=['enc*=*']"],
            "no array's name matches 'enc*'",
            "the first names are ",
        ),
        (
            {},
            ["model.weights_names=['*.*=a.*']"],
            "has 2 * before the = and 1 after it",
            "the same number",
        ),
        (
            {},
            ["model.weights_names=['norm1.*=norm2.*']"],
            "model.weights_names: norm1.*=norm2.* makes norm1.",
            "matches one of them",
        ),
        (
            {},
            ["model.weights_names=['encoder']"],
            "model.weights_names: encoder is not OLD=NEW",
            "'encoder=' excludes it",
        ),
        (
            {},
            ["model.freeze=['convx*']"],
            "model.freeze: convx* matches no weight of the model",
            "known: conv1.weight",
        ),
        ({}, ["model.freeze=['*']"], "model.freeze=['*'] leaves nothing to train", "fewer names"),
        (
            {},
            ["framework=jax", FROZEN],
            "framework=jax does not support model.freeze=",
            "framework=torch",
        ),
    ],
)
def test_what_does_not_fit(
    change: dict[str, Any] | None,
    words: list[str],
    what: str,
    fix: str,
    trained: Path,
    tmp_path: Path,
) -> None:
    weights = {"a": np.ones(2)} if change is None else weights_of(trained) | change
    save_file(weights, tmp_path / "w.safetensors")
    with pytest.raises(UserError) as caught:
        hvdtrain.train(
            {"run": str(tmp_path / "run")},
            *JOB.split(),
            f"model.weights={tmp_path / 'w.safetensors'}",
            *words,
        )
    assert what in caught.value.what and fix in caught.value.fix, str(caught.value)


def test_names_are_changed_inside(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With * for what stays, one entry after the other; a prefix among them."""
    expected = weights_of(trained)
    inner = {name: re.sub(r"(conv|norm)([12])[.]", r"block.\2.the_\1.", name) for name in expected}
    others = {f"net.{inner[name]}": array for name, array in expected.items()}
    assert {"net.block.1.the_conv.weight", "net.block.2.the_norm.running_mean"} < others.keys()
    save_file(others, tmp_path / "w.safetensors")
    renames = "model.weights_names=['net.=','block.*.the_*.*=*.*.*','1.*.*=*1.*','2.*.*=*2.*']"
    words = [
        "stop.steps=1",
        "optim.base_lr=0",
        "norm.kind=batch",
        "model.freeze=['norm*']",
        f"model.weights={tmp_path / 'w.safetensors'}",
    ]
    run = hvdtrain.train({"run": str(tmp_path / "run")}, *JOB.split(), *words, renames)
    assert f"{len(expected)} of {len(expected)} arrays are loaded" in capsys.readouterr().out
    assert all(np.array_equal(array, expected[name]) for name, array in run.weights.items())


class Tied(torch.nn.Module):
    """Two names for one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(64, 64)
        self.last = torch.nn.Linear(64, 64)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.first(x.flatten(1)))
        return y


def test_a_tied_weight_is_loaded_by_one_of_its_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = {
        name: tensor.numpy()
        for name, tensor in Tied().state_dict().items()
        if name != "last.weight"
    }
    save_file(weights, tmp_path / "w.safetensors")
    words = [
        "model.name=test_pretrained:Tied",
        f"model.weights={tmp_path / 'w.safetensors'}",
        "optim.base_lr=0",
        "stop.steps=1",
    ]
    run = hvdtrain.train({"run": str(tmp_path / "run")}, *words)
    said = capsys.readouterr().out
    assert "3 of 3 arrays are loaded" in said and "left as they begin" not in said
    assert np.array_equal(run.weights["last.weight"], weights["first.weight"])


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of a file ran",)


@pytest.mark.parametrize(
    "kind", ["missing.pt", "code.pt", "text.pt", "cut.safetensors", "empty", "outside"]
)
def test_files_that_are_none(
    kind: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / kind
    if kind == "code.pt":
        torch.save({"a": Evil()}, path)
    elif kind == "text.pt":
        path.write_text("no weights")
    elif kind == "cut.safetensors":
        save_file(weights_of(trained), path)
        path.write_bytes(path.read_bytes()[:-9])
    elif kind != "missing.pt":
        path.mkdir()
    if kind == "outside":
        (path / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "../w.safetensors"}})
        )
    with pytest.raises(UserError) as caught:
        hvdtrain.train({"run": str(tmp_path / "run")}, *JOB.split(), f"model.weights={path}")
    assert (
        caught.value.where == "model.weights, hvdtrain.train()" and str(path) in caught.value.what
    ), str(caught.value)
    assert "code of a file ran" not in capsys.readouterr().out


@needs_mpirun
def test_frozen_layers_stay_on_any_number_of_ranks_and_stage(trained: Path, tmp_path: Path) -> None:
    """Parameters, running statistics and their optimizer state; the trained weights equal those of
    one process to 1e-12."""
    before = weights_of(trained)
    done = mpirun(2, alone("pretrained_on_ranks:frozen_jobs", str(tmp_path), str(trained)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "of them trained" in done.stdout and "model.weights" not in done.stderr
    assert done.stdout.count("each rank reads a part of them from the file") == len(WAYS)
    one = tmp_path / "one"
    hvdtrain.train(
        {"run": str(one), "stop.steps": 9},
        *JOB.split(),
        FROZEN,
        f"model.weights={trained}",
        "optim.momentum=0.9",
    )
    expected = weights_of(one)
    for number, way in enumerate(WAYS):
        found = weights_of(tmp_path / f"{number}")
        for name, weight in found.items():
            if not name.startswith("fc."):
                assert np.array_equal(weight, before[name]), (way, name)
            np.testing.assert_allclose(
                weight, expected[name], rtol=0, atol=1e-12, err_msg=f"{way} {name}"
            )
        assert np.abs(found["fc.weight"] - before["fc.weight"]).max() > 1e-3
    state = [
        name
        for file in (tmp_path / "1" / "checkpoints" / "step-00000009").glob("*.safetensors")
        for name in load_file(file)
    ]
    assert {name.split(".")[1] for name in state if name.startswith("s.")} == {"fc"}


class Net(torch.nn.Module):
    """Two layers with a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(5, 4, bias=False)
        self.norm = torch.nn.BatchNorm1d(4)
        self.last = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(torch.tanh(self.norm(self.first(x))))
        return y


@pytest.mark.parametrize(("rule", "names"), [("sgd", "'first*', 'norm*'"), ("adamw", "'*'")])
def test_weights_are_thawed_as_torch_would(
    rule: str, names: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An optimizer that gets a group more after three steps: its state begins there, and so do
    running statistics. model.thaw may fit weights that are never frozen."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 5))
    data = {"x": x, "y": x.sum(1)}
    words = [
        "epochs=6",
        "batch.size=40",
        "speed.precision=fp64",
        f"optim.name={rule}",
        "optim.base_lr=0.05",
        "optim.weight_decay=0.01",
    ]
    words += [
        "optim.momentum=0.9",
        "optim.exclude=none",
        "optim.clip_norm=0.3",
        "task.standardize=false",
        "log.display=lines",
    ]
    words += [
        "task.name=regression",
        "model.freeze=['first*','norm*']",
        f"model.thaw=[{{at: 3, names: [{names}]}}]",
    ]
    net = Net().double()
    hvdtrain.train(
        {"run": str(tmp_path / "run")}, *words, model=net, train_data=data, val_data=data
    )
    line = "model.thaw[0]: never frozen, and trained from the start: last.weight, last.bias"
    assert (line in capsys.readouterr().out) == (names == "'*'")

    expected = Net().double()
    make: Any = torch.optim.SGD if rule == "sgd" else torch.optim.AdamW
    more = {"momentum": 0.9} if rule == "sgd" else {}
    optimizer = make(expected.last.parameters(), lr=0.05, weight_decay=0.01, **more)
    for step in range(6):
        expected.train()
        trained = list(expected.parameters()) if step >= 3 else list(expected.last.parameters())
        if step < 3:
            expected.norm.eval()
        if step == 3:
            optimizer.add_param_group(
                {"params": [*expected.first.parameters(), *expected.norm.parameters()]}
            )
        optimizer.zero_grad()
        (
            (expected(torch.from_numpy(x)).squeeze(1) - torch.from_numpy(data["y"])) ** 2
        ).mean().backward()
        gradients = [p.grad for p in trained if p.grad is not None]
        norm = torch.sqrt(sum((g.square().sum() for g in gradients), torch.zeros(())))
        for g in gradients:
            g.mul_(min(1.0, 0.3 / float(norm)))
        optimizer.step()
    for name, array in expected.state_dict().items():
        np.testing.assert_allclose(
            net.state_dict()[name].double().numpy(), array.numpy(), rtol=0, atol=1e-12, err_msg=name
        )


@needs_mpirun
def test_weights_are_thawed_on_any_number_of_ranks_and_stage(tmp_path: Path) -> None:
    done = mpirun(2, alone("pretrained_on_ranks:thawed_jobs", str(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "thawed after 4 steps (step 4): conv2*, norm2*" in done.stdout
    for number, way in enumerate(THAW_WAYS):
        own = " ".join(word for word in way.split() if word.startswith("optim."))
        hvdtrain.train({"run": str(tmp_path / f"one{number}"), "stop.steps": 9}, *thawed_words(own))
        found, expected = (weights_of(tmp_path / name) for name in (f"{number}", f"one{number}"))
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            np.testing.assert_allclose(
                weight, expected[name], rtol=0, atol=1e-12, err_msg=f"{way} {name}"
            )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("model.thaw=[{at: 2, names: ['fc*']}]", "matches no weight that model.freeze matches"),
        (
            f"{THAWED.split(' ', 1)[0]} optim.ema=0.9 model.thaw=[{{at: 2, names: ['conv1*']}}]",
            "model.thaw does not support optim.ema=0.9",
        ),
        (
            "model.freeze=['conv*'] model.thaw=[{at: 2, names: ['conv*']},{at: 3, names: ['fc*']}]",
            r"model.thaw: fc\* matches no weight that model.freeze matches",
        ),
        ("model.thaw=[{at: 2}]", "has no names"),
        (
            "framework=jax norm.kind=batch model.thaw=[{at: 2, names: ['fc*']}]",
            "framework=jax does not support model.thaw",
        ),
    ],
)
def test_what_is_not_thawed(words: str, what: str, tmp_path: Path) -> None:
    split = [word for word in re.split(r" (?=[a-z]+\.?[a-z]*=)", words) if word]
    with pytest.raises(UserError, match=what):
        hvdtrain.train({"run": str(tmp_path / "run")}, *JOB.split(), *split)


@needs_extra("export")
def test_adapters_train_as_their_formula(tmp_path: Path) -> None:
    """W x + 2 B A x by torch's own gradient, from the adapter that the job began with; export
    --merged has W + 2 B A."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(40, 5))
    data = {"x": x, "y": x.sum(1, keepdims=True) ** 2}
    words = [
        "batch.size=40",
        "speed.precision=fp64",
        "optim.name=sgd",
        "optim.base_lr=0.05",
        "task.standardize=false",
        "task.name=regression",
    ]
    words += ["model.lora=['last']", "model.lora_rank=1", "model.lora_alpha=2", "optim.momentum=0"]
    runs = []
    for steps in (1, 5):
        net = Net().double()
        where = {"run": str(tmp_path / f"{steps}"), "stop.steps": steps}
        runs.append(hvdtrain.train(where, *words, model=net, train_data=data, val_data=data))
    given = Net().double()
    start = runs[0].weights
    end = runs[1].weights
    # B is zero, so A does not move in the first step
    a = torch.tensor(start["last.lora_A"], requires_grad=True)
    b = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
    given.norm.eval()
    for _ in range(5):
        features = torch.tanh(given.norm(given.first(torch.from_numpy(x)))).detach()
        outputs = features @ (given.last.weight.detach() + 2 * b @ a).T + given.last.bias.detach()
        ((outputs - torch.from_numpy(data["y"])) ** 2).mean().backward()
        with torch.no_grad():
            for p in (a, b):
                assert p.grad is not None
                p.sub_(0.05 * p.grad)
                p.grad = None
    np.testing.assert_allclose(end["last.lora_A"], a.detach().numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(end["last.lora_B"], b.detach().numpy(), rtol=0, atol=1e-12)
    whole = given.last.weight.detach() + 2 * b.detach() @ a.detach()
    np.testing.assert_allclose(net.last.weight.detach().numpy(), whole.numpy(), rtol=0, atol=1e-12)
    assert (
        main(
            [
                "export",
                str(runs[1].folder),
                "--to",
                str(tmp_path / "merged.safetensors"),
                "--merged",
            ]
        )
        == 0
    )
    exported = load_file(tmp_path / "merged.safetensors")
    assert exported.keys() == given.state_dict().keys()
    np.testing.assert_allclose(exported["last.weight"], whole.numpy(), rtol=0, atol=1e-12)


@needs_mpirun
def test_adapters_on_any_number_of_ranks_and_stage(tmp_path: Path) -> None:
    done = mpirun(2, alone("pretrained_on_ranks:adapted_jobs", str(tmp_path)))
    assert done.returncode == 0, done.stdout + done.stderr
    one = {"run": str(tmp_path / "one"), "stop.steps": 9}
    hvdtrain.train(one, *JOB.split()[2:], *LORA.split(), "optim.momentum=0.9")
    expected = weights_of(tmp_path / "one")
    assert {"fc2.weight", "fc2.lora_A", "fc2.lora_B"} < expected.keys() and np.abs(
        expected["fc2.lora_B"]
    ).max() > 1e-3
    for number, way in enumerate(LORA_WAYS):
        found = weights_of(tmp_path / f"{number}")
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            np.testing.assert_allclose(
                weight, expected[name], rtol=0, atol=1e-12, err_msg=f"{way} {name}"
            )


class Around(torch.nn.Module):
    """Takes the weight of its layer, and does not call it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x.flatten(1), self.fc.weight)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("model.name=mlp model.lora=['fc9']", "matches no torch.nn.Linear of the model"),
        (
            "model.name=mlp model.lora=['head'] model.lora_rank=11",
            "model.lora_rank=11 is too large for a layer",
        ),
        ("model.name=mlp model.lora_rank=4", "model.lora_rank=4 has no effect without model.lora"),
        (
            "model.name=mlp model.weights_names=['a=b']",
            r"model.weights_names=\['a=b'\] has no effect without model.weights",
        ),
        (
            "model.name=mlp model.weights_skip=['fc*']",
            r"model.weights_skip=\['fc\*'\] has no effect without model.weights",
        ),
        (
            "framework=jax model.name=mlp model.lora=['fc1']",
            "framework=jax does not support model.lora",
        ),
        (
            "model.name=test_pretrained:Around model.lora=['fc']",
            "the model does not call its layer fc, so an adapter would have no effect",
        ),
    ],
)
def test_what_has_no_adapter_or_no_weights(words: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        hvdtrain.train({"run": str(tmp_path / "run"), "stop.steps": 1}, *words.split())


@needs_extra("export")
def test_a_run_without_adapters_has_nothing_to_merge(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained), "--to", str(tmp_path / "w.safetensors"), "--merged"]) == 2
    assert "has no adapters" in capsys.readouterr().err


@needs_extra("trained_models")
def test_a_net_of_torchvision_gives_what_the_library_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights from a file, with the mean and deviation that they were trained with."""
    torch.manual_seed(0)
    library = import_torchvision().models.resnet18(num_classes=10)
    torch.save(library.state_dict(), tmp_path / "resnet18.pt")
    x = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)
    data = {"x": x, "y": np.arange(12) % 10}
    words = [
        "model.name=torchvision.models:resnet18",
        "model.num_classes=10",
        f"model.weights={tmp_path / 'resnet18.pt'}",
        "batch.size=12",
    ]
    words += [
        "optim.base_lr=0",
        "speed.precision=fp64",
        "model.freeze=['*bn*','*downsample.1*']",
        "data.mean=[0.485,0.456,0.406]",
        "data.std=[0.229,0.224,0.225]",
    ]
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1}, *words, train_data=data, val_data=data
    )
    assert "by channel: mean 0.485 0.456 0.406, std 0.229 0.224 0.225" in capsys.readouterr().out
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=torch.float64)
    inputs = ((torch.from_numpy(x).double() / 255 - mean) / std).permute(0, 3, 1, 2)
    np.testing.assert_allclose(run.transform(x), inputs.numpy(), rtol=0, atol=1e-6)
    with torch.no_grad():
        expected = library.double().eval()(inputs).numpy()
    np.testing.assert_allclose(hvdtrain.predict(run, x), expected, rtol=0, atol=1e-10)
    with pytest.raises(UserError, match="the checkpoint has another task.mean|another .*mean"):
        hvdtrain.train(
            f"resume={run.folder}",
            "stop.steps=2",
            words[0],
            "data.mean=[0.5,0.5,0.5]",
            train_data=data,
            val_data=data,
        )


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("data.mean=[0.5,0.5]", "do not fit images with 1 channel"),
        ("data.mean=[0.5] data.std=[0]", "do not fit images with 1 channel"),
        ("data.std=[0.5]", "do not fit images with 1 channel"),
        (
            "data.mean=[0.5] data.std=[0.5] task.standardize=false",
            "with task.standardize=false, data.mean and data.std have no effect",
        ),
        (
            "data.mean=[0.5] data.std=[0.5] task.name=language data.name=digit_tokens:windows",
            "apply to images",
        ),
    ],
)
def test_a_mean_that_does_not_fit(words: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=what):
        hvdtrain.train(
            {"run": str(tmp_path / "run"), "stop.steps": 1, "model.name": "linear"}, *words.split()
        )


def downloads(url: str) -> torch.nn.Module:
    """A model whose code takes its weights from somewhere, as torchvision's models do."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    net.load_state_dict(torch.hub.load_state_dict_from_url(url, progress=False))
    return net


def test_a_model_downloads_nothing_unless_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    weights = {"1.weight": torch.randn(10, 64), "1.bias": torch.randn(10)}
    torch.save(weights, tmp_path / "weights.pt")
    words = [
        "model.name=test_pretrained:downloads",
        f"model.url={(tmp_path / 'weights.pt').as_uri()}",
        "optim.base_lr=0",
    ]
    with pytest.raises(UserError, match="downloads file:///.*weights.pt"):
        hvdtrain.train({"run": str(tmp_path / "run"), "stop.steps": 1}, *words)
    run = hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1}, *words, "model.download=true"
    )
    assert np.array_equal(run.weights["1.weight"], weights["1.weight"].numpy())
    torch.hub.download_url_to_file(
        words[1].partition("=")[2], str(tmp_path / "copy.pt"), progress=False
    )
    assert (tmp_path / "copy.pt").stat().st_size == (tmp_path / "weights.pt").stat().st_size


READ = {  # what files that are read have
    "plain": DATA,
    "in order": DATA,
    "ring": DATA,
    "cycle": DATA,
    "names of other types": DATA,
    "type C64": DATA,
    "a number": DATA[:4],
    "zip compressed": DATA,
    "expanded": bytes(4),
}
INDEXES: list[tuple[Any, str]] = [
    ({"weight_map": {"w": "a.safetensors"}}, ""),
    *(
        ({"weight_map": {"w": name}}, "which is not a file in that folder")
        for name in ("../a.safetensors", "/etc/passwd", "a\0", ".", "b/c")
    ),
    *(({"weight_map": {"w": name}}, "a folder, not a file") for name in ("..", "", "folder")),
    *(({"weight_map": {"w": name}}, "cannot read") for name in ("none.safetensors", 3, "x" * 5000)),
    ({"weight_map": {"w": "pipe"}}, "a pipe, not a file"),
    (
        {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}},
        "w is in b.safetensors and in another file",
    ),
    ({"weight_map": {"v": "a.safetensors"}}, "names v, which the files do not have"),
    ({"weight_map": {}}, "does not contain named arrays"),
    *(
        (tree, "is not an index of weights")
        for tree in ({"weight_map": ["a.safetensors"]}, {}, [], 3, None)
    ),
]


def test_strange_files_are_read_right_or_refused(tmp_path: Path) -> None:
    """About 190 files: none ends with another exception than UserError, and none takes more memory
    than it has bytes."""
    read = 0
    refused = 0
    for suffix, made in ((".pt", torch_files()), (".safetensors", safetensors_files())):
        for name, content in made:
            path = tmp_path / f"w{suffix}"
            path.write_bytes(content)
            try:
                found = next(iter(read_weights(path, "model.weights")[0].values()))
            except UserError as error:
                assert (
                    str(path) in error.what and "\n" not in error.what and "\x1b" not in error.what
                ), (name, error.what)
                assert name.partition(",")[0] not in READ, (name, error.what)
                refused += 1
            else:
                expected = READ.get(name.partition(",")[0])
                assert (
                    expected is None
                    or np.asarray(found).flat[:12].tobytes()[: len(expected)] == expected
                ), name
                read += 1
    assert read > 30 and refused > 110, (read, refused)


def test_an_index_of_weights(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(tensors_file({"w": ENTRY}))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for tree, what in INDEXES:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(tree))
        if what:
            with pytest.raises(UserError, match=what):
                read_weights(tmp_path, "model.weights")
        else:
            assert read_weights(tmp_path, "model.weights")[0]["w"].tobytes() == DATA
    (tmp_path / "model.safetensors.index.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="is not an index of weights"):
        read_weights(tmp_path, "model.weights")


def test_names_with_brackets(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are shown as they are."""
    save_file(
        {**weights_of(trained), "[/bold]": np.ones(3), "a[0]": np.ones(3)},
        tmp_path / "w.safetensors",
    )
    hvdtrain.train(
        {"run": str(tmp_path / "run"), "stop.steps": 1},
        *JOB.split(),
        f"model.weights={tmp_path / 'w.safetensors'}",
    )
    assert "2 of the file are not of the model: [/bold], a[0]" in capsys.readouterr().out
