"""hvdtrain landscape, beside NumPy: lines, filters, and the largest loss in a box."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.__main__ import main
from hvdtrain.config.read import configure
from hvdtrain.extras.landscape.surface import BETWEEN, filter_normalized
from hvdtrain.extras.trained_models.saved_weights import read_checkpoint
from hvdtrain.training.build import restore_task

JOB = [
    *("framework=numpy", "model.name=linear", "data.name=synthetic", "data.shape=[1,1,2]"),
    *("data.classes=2", "data.samples=64", "data.val_samples=24", "batch.size=8"),
    *("optim.momentum=0", "epochs=2"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    found = [folder / "a", folder / "b"]
    for run, rate in zip(found, (0.05, 0.5), strict=True):
        assert main([*JOB, f"run={run}", f"optim.base_lr={rate}", "recipe.scale=none"]) == 0
    return found


def weights_of(run: Path) -> dict[str, np.ndarray]:
    arrays = read_checkpoint(run, "newest").arrays
    return {name: np.array(a, np.float64) for name, a in arrays.items() if name[:2] == "p."}


def measured(run: Path, *words: Any) -> dict[str, Any]:
    out = run.parent / "out.json"
    assert main(["landscape", str(run), *map(str, words), "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def samples_of(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """The normalized validation samples and their classes."""
    from hvdtrain.training.datasets import open_datasets

    config = configure(None, JOB)
    task = restore_task(config, read_checkpoint(run, "newest").checkpoint.identity["data"])
    source: Any = open_datasets(config)[1]
    batch = source.read(np.arange(24))
    return (batch["x"].reshape(24, 2) / 255 - task.mean) / task.std, batch["y"]


def loss_of(weights: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray) -> float:
    logits = x @ weights["p.fc.weight"].T + weights["p.fc.bias"]
    return float(np.mean(np.log(np.exp(logits).sum(1)) - logits[np.arange(len(y)), y]))


def test_lines_and_sharpness_are_those_of_numpy(
    runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(runs[0], runs[1], "--directions", 1, "--epsilon", 0.1)
    progress = capsys.readouterr().err.splitlines()
    assert len(progress) == 5 and progress[0] == "measured: between the runs"
    x, y = samples_of(runs[0])
    first, second = map(weights_of, runs)
    (line, *around) = found["lines"]
    expected = [
        loss_of({name: first[name] * (1 - s) + second[name] * s for name in first}, x, y)
        for s in BETWEEN
    ]
    assert line["loss"] == pytest.approx(expected, rel=1e-6)
    for one, weights, run in zip(around, (first, second), runs, strict=True):
        assert one["name"] == f"{run}, direction 1" and len(one["loss"]) == 21
        assert one["loss"][10] == pytest.approx(loss_of(weights, x, y), rel=1e-6)
        assert one["loss"][0] != one["loss"][10]
        # a convex loss is largest in a corner of the box
        sides = [
            (name, place) for name, array in weights.items() for place in np.ndindex(array.shape)
        ]
        largest = 0.0
        for signs in itertools.product((-1, 1), repeat=len(sides)):
            corner = {name: array.copy() for name, array in weights.items()}
            for (name, place), sign in zip(sides, signs, strict=True):
                corner[name][place] += sign * 0.1 * (abs(weights[name][place]) + 1)
            largest = max(largest, loss_of(corner, x, y))
        sharp = found["sharpness"][str(run)]
        assert 0.99 * largest < sharp["largest"] < largest * (1 + 1e-6)
        rise = 100 * (sharp["largest"] - sharp["loss"]) / (1 + sharp["loss"])
        assert sharp["percent"] == pytest.approx(rise)
    assert (runs[0] / "landscape.png").read_bytes()[:4] == b"\x89PNG"


def test_filters_are_as_long_as_those_of_the_weights() -> None:
    rng = np.random.default_rng(1)
    weights = {
        "p.conv.weight": rng.normal(size=(4, 3, 2, 2)),
        "p.fc.weight": rng.normal(size=(5, 6)).astype(np.float32),
        "p.fc.bias": rng.normal(size=5),
        "b.norm.running_mean": rng.normal(size=(4, 4)),
    }
    found = filter_normalized(weights, rng)
    assert set(found) == {"p.conv.weight", "p.fc.weight"}
    for name, array in found.items():
        assert array.dtype == weights[name].dtype and array.shape == weights[name].shape
        lengths = [np.linalg.norm(a.reshape(len(a), -1), axis=1) for a in (array, weights[name])]
        np.testing.assert_allclose(*lengths, rtol=1e-6)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([], "one RUN or two are needed, not 0"),
        (["a", "b", "c"], "one RUN or two are needed, not 3: a b c"),
        (["a", "--epsilon", "2"], "--epsilon 0 or more, below 1"),
        (["a", "optim.base_lr=1"], "does not accept optim.base_lr=1"),
        (["missing"], "missing"),
    ],
)
def test_mistakes_are_named(
    words: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["landscape", *words, "--split", "val"]) == 2
    assert what in capsys.readouterr().err


def test_another_model_is_named(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    other = runs[0].parent / "other"
    words = [word for word in JOB if "classes" not in word]
    assert main([*words, "data.classes=3", f"run={other}"]) == 0
    assert main(["landscape", str(runs[0]), str(other)]) == 2
    assert "fc.weight" in capsys.readouterr().err
