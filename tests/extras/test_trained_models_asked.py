"""hvdtrain.predict() and evaluate(): what a run's model says about data, and how well it does, as
plain torch computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch.nn import Flatten, Linear, Sequential, Tanh
from torch.nn.functional import cross_entropy

import hvdtrain
from hvdtrain.errors import UserError

RANDOM = np.random.default_rng(0)
COLUMNS = (RANDOM.uniform(-1, 1, (120, 3)) * [1.0, 5.0, 0.1] + 100.0).astype(np.float32)
LABELS = (COLUMNS[:, 0] > 100).astype(np.int64)
TARGETS = (COLUMNS[:, 0] - 100).astype(np.float32)
PIXELS = RANDOM.integers(60, 140, (120, 5, 6)).astype(np.uint8)
CONFIG: dict[str, Any] = {
    "epochs": 9,
    "stop.steps": 3,
    "batch.size": 16,
    "optim.base_lr": 1e-3,
    "batch.evaluate": 17,
    "run": "run",
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def net(inputs: int, outputs: int) -> Sequential:
    torch.manual_seed(0)
    return Sequential(Flatten(), Linear(inputs, 4), Tanh(), Linear(4, outputs))


def train(x: np.ndarray, y: np.ndarray, config: dict[str, Any], **given: Any) -> hvdtrain.Run:
    data = {"x": x, "y": y}
    return hvdtrain.train({**CONFIG, **config}, train_data=data, val_data=data, **given)


def plain(model: torch.nn.Module, run: hvdtrain.Run, x: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(torch.tensor(run.transform(x))).numpy()
    return found


def test_an_object_says_in_any_form_of_the_data_what_it_says_in_plain_torch() -> None:
    model = net(3, 2)
    run = train(COLUMNS, LABELS, {"task.standardize": True}, model=model)
    expected = plain(model, run, COLUMNS)
    frame = pandas.DataFrame(COLUMNS, columns=["a", "b", "c"])
    rows = torch.utils.data.TensorDataset(torch.tensor(COLUMNS), torch.tensor(LABELS))
    with_labels = {"x": COLUMNS, "y": LABELS}
    for data in (
        COLUMNS,
        torch.tensor(COLUMNS),
        {"x": COLUMNS.astype(np.float64)},
        with_labels,
        frame,
        frame.assign(y=LABELS),
        rows,
    ):
        np.testing.assert_allclose(hvdtrain.predict(run, data), expected, rtol=1e-6, atol=1e-6)
    again = net(3, 2)
    np.testing.assert_allclose(
        hvdtrain.predict("run", COLUMNS[:7], model=again), expected[:7], rtol=1e-6, atol=1e-6
    )
    assert torch.equal(again[1].weight, net(3, 2)[1].weight)
    found = hvdtrain.evaluate(run, with_labels)
    logits = torch.tensor(expected)
    assert found == pytest.approx(
        {
            "loss": cross_entropy(logits, torch.tensor(LABELS)).item(),
            "accuracy": (logits.argmax(1).numpy() == LABELS).mean(),
        },
        rel=1e-6,
    )
    assert found["accuracy"] == run.last


def test_a_loss_and_metrics_of_a_script() -> None:
    def squares(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (outputs[:, 0] - batch["y"]) ** 2

    def error(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (outputs[:, 0] - batch["y"]).abs()

    metrics = {"error": (error, "min")}
    for config, model in (({"model.name": "mlp"}, None), ({"task.standardize": True}, net(3, 1))):
        folder = f"run{len(config)}{model is None}"
        run = train(
            COLUMNS, TARGETS, {**config, "run": folder}, model=model, loss=squares, metrics=metrics
        )
        outputs = hvdtrain.predict(run, COLUMNS)
        assert outputs.shape == (120, 1)
        expected = {
            "loss": ((outputs[:, 0] - TARGETS) ** 2).mean(),
            "error": np.abs(outputs[:, 0] - TARGETS).mean(),
        }
        assert hvdtrain.evaluate(run, {"x": COLUMNS, "y": TARGETS}) == pytest.approx(
            expected, rel=1e-5
        )
        assert run.last == pytest.approx(expected["loss"], rel=1e-5)
        half = {"x": COLUMNS[::2], "y": TARGETS[::2]}
        assert hvdtrain.evaluate(folder, half, model=model, loss=squares)["loss"] == pytest.approx(
            ((outputs[::2, 0] - TARGETS[::2]) ** 2).mean(), rel=1e-5
        )
    run = train(
        COLUMNS,
        LABELS,
        {"model.name": "linear", "run": "own"},
        metrics={"one": (lambda outputs, batch: batch["y"], "max")},
    )
    assert hvdtrain.evaluate(run, {"x": COLUMNS, "y": LABELS})["one"] == pytest.approx(
        LABELS.mean()
    )
    assert hvdtrain.predict(run, COLUMNS).shape == (120, 2)


@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_images_of_every_layout_and_numbers_in_every_framework(framework: str) -> None:
    run = train(PIXELS, LABELS, {"model.name": "linear", "framework": framework})
    found = hvdtrain.predict(run, PIXELS)
    assert found.shape == (120, 2)
    for data in (
        PIXELS[:, None],
        PIXELS[..., None],
        {"x": torch.tensor(PIXELS), "y": torch.tensor(LABELS)},
    ):
        np.testing.assert_array_equal(hvdtrain.predict(run, data), found)
    expected = cross_entropy(
        torch.tensor(np.asarray(found, np.float64)), torch.tensor(LABELS)
    ).item()
    assert hvdtrain.evaluate(run, {"x": PIXELS, "y": LABELS})["loss"] == pytest.approx(
        expected, rel=1e-5
    )


def test_tokens() -> None:
    tokens = RANDOM.integers(0, 7, (40, 9))
    source = hvdtrain_source(tokens)
    config = {
        "task.name": "language",
        "model.name": "gpt",
        "model.layers": 1,
        "model.width": 8,
        "model.heads": 1,
    }
    run = hvdtrain.train({**CONFIG, **config}, train_data=source, val_data=source)
    logits = hvdtrain.predict(run, tokens)
    assert logits.shape == (40, 8, 7)
    expected = cross_entropy(
        torch.tensor(logits).flatten(0, 1), torch.tensor(tokens[:, 1:]).flatten()
    ).item()
    assert hvdtrain.evaluate(run, source)["loss"] == pytest.approx(expected, rel=1e-5)
    # the last token is not read
    np.testing.assert_array_equal(hvdtrain.predict(run, tokens[:, :-1]), logits)


def hvdtrain_source(tokens: np.ndarray) -> Any:
    from hvdtrain.data.source import NamedArrays

    return NamedArrays({"tokens": tokens}, {"tokens": 7})


def test_samples_without_a_class_are_in_no_metric_and_no_count() -> None:
    """The job without them computes the same weights, metrics and counts; batches differ, so it is
    one of all samples."""
    has_class = np.arange(120) % 3 > 0
    config = {
        "stop.steps": 5,
        "epochs": 9,
        "evaluate.every_steps": 5,
        "optim.base_lr": 0.1,
        "speed.precision": "fp64",
    }
    model = net(3, 2).double()
    alone = net(3, 2).double()
    x = COLUMNS.astype(np.float64) - 100
    labels = np.where(has_class, LABELS, 255).astype(np.uint8)
    run = train(
        x,
        labels,
        config | {"batch.size": 120, "optim.base_batch": 120, "task.ignore_label": 255},
        model=model,
    )
    others = train(
        x[has_class],
        LABELS[has_class],
        config | {"batch.size": 80, "optim.base_batch": 80, "run": "others"},
        model=alone,
    )
    events = [hvdtrain.read(name) for name in ("run", "others")]
    (one, other) = (frame[frame.kind == "epoch"].iloc[-1] for frame in events)
    assert (one.val_count, other.val_count) == (80, 80)
    found = hvdtrain.evaluate(run, {"x": x, "y": labels})
    assert found == pytest.approx(
        hvdtrain.evaluate(others, {"x": x[has_class], "y": LABELS[has_class]}), rel=1e-9
    )
    assert one.val_loss == pytest.approx(
        found["loss"], rel=1e-9
    ) and one.train_loss == pytest.approx(other.train_loss, rel=1e-9)


def test_what_does_not_fit_is_named() -> None:
    run = train(COLUMNS, LABELS, {}, model=net(3, 2))
    for given, what in (
        (COLUMNS[:, :2], r"the model takes x float32 \(3,\), the data have it as float32 \(2,\)"),
        ({"z": COLUMNS}, r"the model takes x float32 \(3,\), the data have z"),
        (COLUMNS[:0], "data has no samples"),
    ):
        with pytest.raises(hvdtrain.UserError, match=what):
            hvdtrain.predict(run, given)
    with pytest.raises(hvdtrain.UserError, match=r"y of sample 3 has 2, expected 0 to 1"):
        hvdtrain.evaluate(run, {"x": COLUMNS[:4], "y": np.array([0, 1, 0, 2])})
    pairs = list(zip(COLUMNS[:4], [0, 1, 0, -1], strict=True))
    with pytest.raises(hvdtrain.UserError, match=r"y of sample 3 has -1, expected 0 to 1"):
        hvdtrain.evaluate(run, pairs)
    with pytest.raises(hvdtrain.UserError, match=r"the data have x"):
        hvdtrain.evaluate(run, {"x": COLUMNS})
    with pytest.raises(hvdtrain.UserError, match="is an object that only its script defines"):
        hvdtrain.predict("run", COLUMNS)
    with pytest.raises(hvdtrain.UserError, match="no checkpoint step-9"):
        hvdtrain.predict(run, COLUMNS, checkpoint="step-9")


def test_frames_have_their_columns_in_one_order() -> None:
    frame = pandas.DataFrame(COLUMNS, columns=["a", "b", "c"])
    other = frame[["a", "c", "b"]]
    pairs = (
        ({"x": frame, "y": LABELS}, {"x": other, "y": LABELS}),
        ((frame, LABELS), (other, LABELS)),
        (frame.assign(label=LABELS), other.assign(label=LABELS)),
    )
    for data, val_data in pairs:
        with pytest.raises(UserError) as caught:
            hvdtrain.train(
                CONFIG | {"run": None}, train_data=data, val_data=val_data, model=net(3, 2)
            )
        assert "column 1 of x is b in the training set, and c in the validation" in str(
            caught.value.what
        )
        assert "val_frame[train_frame.columns]" in str(caught.value.fix)
    hvdtrain.train(
        CONFIG, train_data=(frame, LABELS), val_data=frame.assign(y=LABELS), model=net(3, 2)
    )


def test_frames_without_a_target_are_read_by_name() -> None:
    """Each column is a field then."""
    frame = pandas.DataFrame({"u": COLUMNS[:, 0], "v": LABELS.astype(float)})

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, u: torch.Tensor) -> torch.Tensor:
            return self.weight * u.reshape(-1)

    def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (output - batch["v"]) ** 2

    losses = []
    for run, val in (("one", frame), ("two", frame[["v", "u"]])):
        hvdtrain.train(
            CONFIG | {"run": run}, train_data=frame, val_data=val, model=Model(), loss=loss
        )
        losses.append(hvdtrain.read(run)["val_loss"].dropna().tolist())
    assert losses[0] and losses[0] == losses[1]
