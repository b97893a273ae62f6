"""What a model gets of the data, for every task and source: what is reported is what plain torch
gives with the exported weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn import Embedding, Flatten, Linear, Sequential, Tanh
from torch.nn.functional import cross_entropy, mse_loss

import hvdtrain
from hvdtrain.extras.export.weights import export

RANDOM = np.random.default_rng(0)
POINTS = RANDOM.uniform(-1, 1, (120, 3))
COLUMNS = (POINTS * [1.0, 5.0, 0.1] + 100.0).astype(np.float32)  # at mean 100
LABELS = (POINTS.sum(1) > 0).astype(np.int64)
PIXELS = RANDOM.integers(60, 140, (120, 4, 3, 1)).astype(np.uint8)
TRAIN = slice(0, 80)
VAL = slice(80, 120)
BY_COLUMN = "inputs  (x - mean) / std by column"
AS_GIVEN = "inputs  x as the data have it, float32"

Data = dict[str, Any]


class Rows(torch.utils.data.Dataset[Any]):
    """A torch Dataset of pairs."""

    classes = 2

    def __init__(self, data: Data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(self.data["x"][index]), int(self.data["y"][index])


class Net(torch.nn.Module):
    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.body = net(int(np.prod(shape)), outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def net(inputs: int, outputs: int) -> Sequential:
    torch.manual_seed(0)
    return Sequential(Flatten(), Linear(inputs, 4), Tanh(), Linear(4, outputs))


def of_rows(x: np.ndarray, y: np.ndarray) -> tuple[Data, Data]:
    return {"x": x[TRAIN], "y": y[TRAIN]}, {"x": x[VAL], "y": y[VAL]}


def squares(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (outputs[:, 0] - batch["y"]) ** 2


def perceptron(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """model.name=mlp, by hand."""
    hidden = torch.relu(x.flatten(1) @ weights["fc1.weight"].T + weights["fc1.bias"])
    return hidden @ weights["head.weight"].T + weights["head.bias"]


def by_formula(x: np.ndarray) -> torch.Tensor:
    """What the exported file says that the model gets."""
    with safe_open("m.safetensors", "np") as file:
        fields = file.metadata()
    assert ("mean" in fields) == ("mean" in fields["inputs"]) or "pixels" in fields["inputs"]
    numbers = {
        name: torch.tensor(json.loads(fields[name]), dtype=torch.float32)
        for name in ("mean", "std")
        if name in fields
    }
    given = torch.tensor(
        x if x.dtype.kind in "iu" and "pixels" not in fields["inputs"] else x.astype(np.float32)
    )
    found: torch.Tensor = eval(fields["inputs"], {"x": given, "pixels": given, **numbers})
    return found.permute(0, 3, 1, 2) if x.dtype == np.uint8 else found


MLP = {"model.name": "mlp", "model.widths": [4]}
TARGETS = POINTS.prod(1).astype(np.float32)
REGRESSION = {"task.name": "regression"}
CASES: dict[str, tuple[dict[str, Any], Any, np.ndarray, np.ndarray, str, dict[str, Any]]] = {
    # config, model, x, y, the header, further arguments
    "README, a loss": ({}, lambda: net(3, 1), COLUMNS, TARGETS, AS_GIVEN, {"loss": squares}),
    "a loss, standardized": (
        {"task.standardize": True},
        lambda: net(3, 1),
        COLUMNS,
        TARGETS,
        BY_COLUMN,
        {"loss": squares},
    ),
    "a loss, mlp": (MLP, None, COLUMNS, TARGETS, BY_COLUMN, {"loss": squares}),
    "tutorial, images": (
        MLP,
        None,
        PIXELS,
        LABELS,
        "inputs  (pixels / 255 - mean) / std by channel: mean 0.39",
        {},
    ),
    "images as they are": (
        MLP | {"task.standardize": False},
        None,
        PIXELS,
        LABELS,
        "inputs  pixels / 255, not normalized",
        {},
    ),
    "images of an object": (
        {},
        lambda: net(12, 2),
        PIXELS,
        LABELS,
        "inputs  (pixels / 255 - mean) / std by channel",
        {},
    ),
    "own-data, arrays": (MLP | REGRESSION, None, COLUMNS, TARGETS, BY_COLUMN, {}),
    "mlp as the data are": (
        MLP | REGRESSION | {"task.standardize": False},
        None,
        COLUMNS,
        TARGETS,
        AS_GIVEN,
        {},
    ),
    "classes of an object": ({}, lambda: net(3, 2), COLUMNS, LABELS, AS_GIVEN, {}),
    "classes of a class": ({}, lambda: Net, COLUMNS, LABELS, AS_GIVEN, {}),
    "classes of mlp": (MLP, None, COLUMNS, LABELS, BY_COLUMN, {}),
    "classes, standardized": (
        {"task.standardize": True},
        lambda: net(3, 2),
        COLUMNS,
        LABELS,
        BY_COLUMN,
        {},
    ),
    "numbers of an object": (REGRESSION, lambda: net(3, 1), COLUMNS, TARGETS, AS_GIVEN, {}),
    "rows, standardized": (
        REGRESSION | {"task.standardize": True},
        lambda: net(6, 1),
        COLUMNS[:, [0, 1, 2, 1, 2, 0]].reshape(-1, 2, 3),
        TARGETS,
        "inputs  (x - mean) / std by its last axis",
        {},
    ),
    "single numbers": (REGRESSION, lambda: net(1, 1), COLUMNS[:, 0], TARGETS, AS_GIVEN, {}),
    "integers": (
        {},
        lambda: Sequential(Embedding(120, 2), Flatten(), Linear(6, 2)),
        COLUMNS.astype(np.int32),
        LABELS,
        "inputs  x as the data have it, int32;",
        {},
    ),
    "integers of mlp": (MLP, None, COLUMNS.astype(np.int16), LABELS, BY_COLUMN, {}),
}


# of a torch Dataset too
ROWS = [
    "tutorial, images",
    "classes of an object",
    "classes of mlp",
    "classes, standardized",
    "integers",
]
FORMS = [pytest.param(case, dict, id=f"{case}, arrays") for case in CASES] + [
    pytest.param(case, Rows, id=f"{case}, Dataset") for case in ROWS
]


@pytest.mark.in_turn
@pytest.mark.parametrize(("case", "form"), FORMS)
def test_what_is_reported_is_what_plain_torch_gives_with_the_exported_weights(
    case: str, form: Callable[[Data], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    config, make, x, y, header, given = CASES[case]
    train, val = of_rows(x, y)
    model = None if make is None else make()
    steps = {"epochs": 9, "stop.steps": 3, "batch.size": 16, "optim.base_lr": 1e-4, "run": "run"}
    run = hvdtrain.train(
        {**config, **steps}, model=model, train_data=form(train), val_data=form(val), **given
    )
    assert header in capsys.readouterr().out
    reported = hvdtrain.read(run).query("kind == 'epoch'").val_loss.iloc[-1]
    assert export(["run", "--to", "m.safetensors"]) == 0
    weights = load_file("m.safetensors")

    def outputs(inputs: torch.Tensor) -> torch.Tensor:
        if make is None:
            return perceptron(weights, inputs)
        fresh = make() if isinstance(model, torch.nn.Module) else Net((3,), 2)
        fresh.load_state_dict(weights)
        return fresh(inputs)

    rows = val["x"][:, None] if val["x"].ndim == 1 else val["x"]
    target = torch.tensor(val["y"])
    for inputs in (
        by_formula(rows),
        torch.tensor(run.transform(val["x"])),
        run.transform(torch.tensor(val["x"])),
    ):
        with torch.no_grad():
            found = outputs(inputs)
        loss = (
            cross_entropy(found, target)
            if target.dtype == torch.int64
            else mse_loss(found[:, 0], target)
        )
        assert loss.item() == pytest.approx(reported, rel=1e-5)
    assert torch.equal(run.transform(torch.tensor(val["x"])), torch.tensor(run.transform(val["x"])))


def test_a_run_goes_on_with_the_inputs_that_it_began_with_or_says_how() -> None:
    """Older versions standardized columns for every model: what their checkpoints say is what
    task.standardize=true says now."""
    train, val = of_rows(COLUMNS, LABELS)
    config = {"epochs": 9, "batch.size": 16, "run": "run", "optim.base_lr": 1e-4}
    given: dict[str, Any] = {"train_data": train, "val_data": val}
    hvdtrain.train(config, "task.standardize=true", "stop.steps=3", model=net(3, 2), **given)
    progress = json.loads(next(Path("run/checkpoints").glob("step-*/progress.json")).read_text())
    expected = COLUMNS[TRAIN].astype(np.float64)
    np.testing.assert_allclose(progress["identity"]["data"]["mean"], expected.mean(0), rtol=1e-12)
    np.testing.assert_allclose(progress["identity"]["data"]["std"], expected.std(0), rtol=1e-12)
    Path("run/config.yaml").write_text(
        Path("run/config.yaml").read_text().replace("standardize: true", "standardize: null")
    )
    with pytest.raises(hvdtrain.UserError) as caught:
        hvdtrain.train(config, "resume=auto", "stop.steps=4", model=net(3, 2), **given)
    assert caught.value.what == (
        "the model of the checkpoint was trained on x less its mean, over its deviation, but "
        "this job would train it on x as the data have it"
    )
    assert (caught.value.fix or "").startswith(
        "resume=RUN task.standardize=true; or start another job"
    )
    assert (
        hvdtrain.train(
            config, "resume=run", "stop.steps=4", "task.standardize=true", model=net(3, 2), **given
        ).steps
        == 4
    )


@pytest.mark.parametrize(("before", "now"), [("true", "false"), ("false", "true")])
def test_a_loss_does_not_go_on_with_other_inputs(before: str, now: str) -> None:
    train, val = of_rows(COLUMNS, TARGETS)
    config = {"epochs": 9, "batch.size": 16, "run": "run", "optim.base_lr": 1e-4}
    given: dict[str, Any] = {"train_data": train, "val_data": val, "loss": squares}
    hvdtrain.train(config, f"task.standardize={before}", "stop.steps=2", model=net(3, 1), **given)
    with pytest.raises(hvdtrain.UserError, match="this job would train it on x"):
        hvdtrain.train(
            config,
            "resume=auto",
            f"task.standardize={now}",
            "stop.steps=3",
            model=net(3, 1),
            **given,
        )


def test_what_is_no_row_of_x_and_no_value_of_the_key() -> None:
    train, val = of_rows(COLUMNS, LABELS)
    config = {"epochs": 1, "stop.steps": 1, "run": "run", "model.name": "linear"}
    run = hvdtrain.train(config, train_data=train, val_data=val)
    with pytest.raises(
        hvdtrain.UserError,
        match=r"x is float32 \(40, 2\), but the model was trained on rows of float32 \(3,\)",
    ):
        run.transform(val["x"][:, :2])
    with pytest.raises(hvdtrain.UserError) as caught:
        dataclasses.replace(run, inputs=None).transform(val["x"])
    assert caught.value.fix == "call the task's inputs()"
    with pytest.raises(hvdtrain.UserError) as caught:
        whole = {"x": COLUMNS.astype(np.int64), "y": LABELS}
        hvdtrain.train({"run": "whole"}, model=net(3, 2), train_data=whole, val_data=whole)
    fix = (
        "the model gets (n, 3) of int64, as the data have them; for floats x.float() in "
        "forward(), floats in the data, or "
    )
    assert caught.value.fix == fix + "task.standardize=true"
    with pytest.raises(hvdtrain.UserError, match=r"task\.standardize"):
        hvdtrain.train(config, "task.standardize=often", train_data=train, val_data=val)
    with pytest.raises(hvdtrain.UserError, match=r"task\.standardize is 'often'"):
        hvdtrain.train(
            {"epochs": 1},
            "task.standardize=often",
            model=net(3, 1),
            train_data=train,
            val_data=val,
            loss=squares,
        )
