"""hvdtrain export --to model.pt2 and model.onnx: files that compute what the model does."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks import needs_extra
from safetensors.torch import load_file
from torch import nn

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.errors import UserError
from hvdtrain.extras.export.command import export
from hvdtrain.extras.export.graph.pt2_file import FACTS
from hvdtrain.extras.export.graph.traced import TracedModel, quiet
from hvdtrain.frameworks.torch.call import Passed

pytestmark = needs_extra("pretrained")  # a run has adapters
HERE = "test_export_graph"
has_onnx = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
STEP = ["max_steps=1", "batch.size=8", "seed=3", "speed.device=cpu"]


class Encoder(nn.Module):
    """A padded sequence and a table, with the mask of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 8)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False
        )
        self.out = nn.Linear(11, 3)

    def forward(self, ids: torch.Tensor, table: torch.Tensor, ids_mask: torch.Tensor) -> Any:
        hidden = self.layers(self.words(ids), src_key_padding_mask=~ids_mask)
        mean = (hidden * ids_mask[:, :, None]).sum(1) / ids_mask.sum(1, keepdim=True)
        return self.out(torch.cat([mean, table], 1))


class AsksForNumbers(nn.Module):
    """A model whose path depends on the numbers of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x if x.sum() > 0 else -x)


class OneBatch(nn.Module):
    """A model that takes the first sample of a batch as special."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.stack([x[i] for i in range(x.shape[0])]))


def rows(count: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(count, 6)), "y": rng.integers(0, 2, count)}


def sequences(count: int = 16) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    ids = [rng.integers(1, 7, length) for length in rng.integers(2, 9, count)]
    table = rng.normal(size=(count, 3)).astype(np.float32)
    return {"ids": ids, "table": table, "y": rng.integers(0, 3, count)}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step for each kind of model."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 20)
    images = ["data.name=digits"]
    ghost = ["norm.kind=ghost", "norm.ghost=2"]
    gpt = ["model.layers=1", "model.width=8", "model.heads=2", "task.name=language"]
    gpt += ["data.val_share=0.2", "data.context=12"]
    jobs = {
        "mlp": [*images, "model.name=mlp", "model.lora=['*']", "model.lora_rank=2"],
        "convnet": [*images, "model.name=wide_resnet", "model.widths=[4,4,4,4]", *ghost],
        "gpt": [f"data.root={text}", "data.name=text", "model.name=gpt", *gpt],
        "numpy": [*images, "framework=numpy", "model.name=linear"],
    }
    for name, words in jobs.items():
        assert main([*STEP, *words, f"run={folder / name}"]) == 0
    for kind, data in ((Encoder, sequences()), (AsksForNumbers, rows()), (OneBatch, rows())):
        words = ["data.pad={ids: 0}"] if kind is Encoder else []
        where = f"run={folder / kind.__name__}"
        name = f"model.name={HERE}:{kind.__name__}"
        hvdtrain.train(*STEP, *words, name, where, train_data=data, val_data=data)
    return folder


def written(run: Path, name: str, *words: str) -> Path:
    to = run.parent / f"{run.name}{name}"
    assert export([str(run), "--to", str(to), *words]) == 0
    assert not list(run.parent.glob(".*unfinished*"))
    return to


def refused(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The error of an export, which leaves no file behind."""
    to = run.parent / "no.pt2"
    try:
        assert export([str(run), "--to", str(to), *words]) == 2
        text = capsys.readouterr().err
    except UserError as error:
        text = str(error)
    assert not to.exists() and not list(run.parent.glob(".*unfinished*"))
    return text


def loaded(path: Path) -> tuple[nn.Module, dict[str, str]]:
    """The model of a .pt2 file, as software without hvdtrain reads it, and its metadata."""
    files = {FACTS: ""}
    with quiet():
        model = torch.export.load(path, extra_files=files).module()
    return model, json.loads(files[FACTS])


@needs_extra("trained_models")
def test_pt2_of_a_model_of_images(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The outputs are those that `predict` gives for the same images; the file needs no model."""
    to = written(runs / "convnet", ".pt2")
    lines = capsys.readouterr().out.splitlines()
    model, facts = loaded(to)
    assert "takes    x float32 (batch, 1, 8, 8), computed in float32" in lines
    assert (
        "read back: batches of 1 and 5 random samples have the model's outputs, bit for bit"
        in lines
    )
    assert facts["signature"] == "x float32 (batch, 1, 8, 8)" and facts["step"] == "1"
    images = np.random.default_rng(1).integers(0, 256, (7, 8, 8, 1), dtype=np.uint8)
    mean, std = (np.float32(json.loads(facts[name])) for name in ("mean", "std"))
    x = (np.float32(images.transpose(0, 3, 1, 2)) / 255 - mean) / std
    expected = hvdtrain.predict(runs / "convnet", images)
    with torch.no_grad():
        np.testing.assert_allclose(model(torch.tensor(x)), expected, rtol=0, atol=1e-5)


def test_adapters_are_merged(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs / "mlp"
    assert "which a file of the computation has only merged" in refused(run, capsys)
    weights = written(run, ".safetensors", "--merged")
    model, _ = loaded(written(run, ".pt2", "--merged"))
    merged = load_file(weights)
    assert {n: t.tolist() for n, t in model.state_dict().items()} == {
        n: t.tolist() for n, t in merged.items()
    }
    assert "has no adapters\n  where: --merged" in refused(runs / "gpt", capsys, "--merged")


def test_pt2_of_tokens_has_any_length(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = written(runs / "gpt", ".pt2")
    assert "takes    tokens int64 (batch, length <= 12)" in capsys.readouterr().out
    model, _ = loaded(to)
    assert model(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 256)


@needs_extra("trained_models")
def test_pt2_of_padded_sequences_with_a_mask(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runs / "Encoder"
    name = f"model.name={HERE}:Encoder"
    assert f"if you trust it, add the argument {name}" in refused(run, capsys)
    model, facts = loaded(written(run, ".pt2", name))
    ids, mask = "ids int64 (batch, length)", "ids_mask bool (batch, length)"
    assert facts["signature"] == f"{ids}, table float32 (batch, 3), {mask}"
    data = sequences(6)
    del data["y"]
    expected = hvdtrain.predict(run, data, name)
    longest = max(map(len, data["ids"]))
    padded = torch.tensor([[*one, *[0] * (longest - len(one))] for one in data["ids"]])
    with torch.no_grad():
        found = model(ids=padded, table=torch.tensor(data["table"]), ids_mask=padded > 0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_the_reason_of_the_library_is_one_line(
    runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reasons = {
        "AsksForNumbers": "Could not guard on data-dependent expression",
        "OneBatch": "your code specialized it to be a constant",
    }
    for name, reason in reasons.items():
        words = [str(runs / name), "--to", str(runs / "no.pt2"), f"model.name={HERE}:{name}"]
        assert export(words) == 2
        what, where, fix, *others = capfd.readouterr().err.splitlines()
        assert (
            what.startswith("hvdtrain: torch.export cannot record model.name=") and reason in what
        )
        assert fix.startswith("  fix: --to model.safetensors") and "Traceback" not in str(others)
        if name == "AsksForNumbers":
            assert "return self.out(x if x.sum() > 0 else -x)" in where
    assert not (runs / "no.pt2").exists() and not list(runs.glob(".*"))


def test_a_file_that_computes_something_else_is_an_error(runs: Path) -> None:
    """A model whose numbers change with each call."""
    with pytest.raises(UserError, match="the outputs of the file differ from the model's by 1, "):
        one = torch.ones(2)
        model = TracedModel(nn.Identity(), None, [Passed((one,), {})], "model.name")  # type: ignore[arg-type]
        model.check(lambda inputs: [one + one], 1e-6)


def test_other_frameworks(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "framework=numpy; a .pt2 file needs framework=torch" in refused(runs / "numpy", capsys)


@pytest.mark.skipif(not has_onnx, reason="onnx, onnxscript or onnxruntime is not installed")
def test_onnx(runs: Path) -> None:
    import onnxruntime

    for name, words in {"gpt": [], "Encoder": [f"model.name={HERE}:Encoder"]}.items():
        to = written(runs / name, ".onnx", *words)
        model = onnxruntime.InferenceSession(str(to))
        shapes = [one.shape for one in model.get_inputs()]
        lengths = {"gpt": [["batch", "length"]], "Encoder": [["batch", "length"], ["batch", 3]]}
        assert shapes[:2] == lengths[name]
        assert model.get_modelmeta().custom_metadata_map["framework"] == "torch"
