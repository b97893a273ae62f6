"""Models with several inputs: steps beside torch by hand on 1, 2 and 3 ranks, resumed and asked checkpoints, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_inputs
from rank_threads import in_threads
from torch.nn import functional

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.training.build import build_learner, restore_task
from hvdtrain.training.checkpoint import files
from hvdtrain.training.datasets import open_datasets

WORDS = ["speed.precision=fp64", "optim.name=sgd", "batch.size=7", "optim.base_lr=0.05"]
SHARES = {1: [0, 23], 2: [0, 15, 23], 3: [0, 2, 3, 23]}  # where the ranks' samples begin and end

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TASKS: dict[str, tuple[str, str, Loss]] = {  # data, model, the mean loss
    "regression": ("fields", "Net", lambda outputs, y: functional.mse_loss(outputs[:, 0], y)),
    "classification": ("classes", "Net", functional.cross_entropy),
    "multilabel": ("labels", "OfDict", lambda outputs, y: functional.binary_cross_entropy_with_logits(outputs, y.double())),
    "segmentation": ("masks", "OfPixels", functional.cross_entropy),
}


def words_of(task: str, *more: str) -> list[str]:
    data, model, _ = TASKS[task]
    inputs = ["data.inputs=[image,table]"] * (model == "OfDict")
    return [f"data.name=two_inputs:{data}", f"task.name={task}", f"model.name=two_inputs:{model}", *inputs, *WORDS, *more]


def by_hand(data: dict[str, np.ndarray], is_standardized: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model gets of the image and of the table."""
    pixels, table = data["image"] / 255, data["table"]
    image = torch.tensor((pixels - pixels.mean()) / pixels.std()).permute(0, 3, 1, 2)
    return image, torch.tensor((table - table.mean(0)) / table.std(0) if is_standardized else table)


def outputs_by_hand(model: torch.nn.Module, image: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = model({"image": image, "table": table}) if isinstance(model, two_inputs.OfDict) else model(image, table)
    return found


def stepped(model: torch.nn.Module, inputs: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor, loss: Loss, lr: float) -> None:
    gradients = torch.autograd.grad(loss(outputs_by_hand(model, *inputs), y), list(model.parameters()))
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.sub_(gradient, alpha=lr)


@pytest.mark.parametrize("name", TASKS)
def test_steps_are_those_of_torch_on_any_number_of_ranks(name: str) -> None:
    config = configure(None, words_of(name, *["task.standardize=true"] * (name == "multilabel")))
    train, _, task, *_ = open_datasets(config)
    data = getattr(two_inputs, TASKS[name][0])()
    first = {f"p.{key}": value.numpy() for key, value in getattr(two_inputs, TASKS[name][1])(_outputs(name)).double().state_dict().items()}

    def trained(rank: Communicator) -> dict[str, np.ndarray]:
        one, edges = build_learner(config, task, rank), SHARES[rank.size]
        one.load(one.state() | first)
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        for step in range(3):
            micro = [one.to_device(train.read(part)) for part in (rows[:4], rows[4:])]
            one.step(micro, Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=23, step=step), step)
        found: dict[str, np.ndarray] = one.state()
        return found

    model = getattr(two_inputs, TASKS[name][1])(_outputs(name)).double()
    model.load_state_dict({key.removeprefix("p."): torch.tensor(value) for key, value in first.items()})
    inputs = by_hand(data, is_standardized=name == "multilabel")
    for _ in range(3):
        stepped(model, inputs, torch.tensor(data["y"]), TASKS[name][2], 0.3)
    for size in (1, 2, 3):
        for found in in_threads(size, trained):
            for key, p in model.named_parameters():
                np.testing.assert_allclose(found[f"p.{key}"], p.detach(), rtol=1e-12, atol=1e-14)
                assert np.abs(found[f"p.{key}"] - first[f"p.{key}"]).max() > 1e-3, key
    assert restore_task(config, task.facts()).facts() == task.facts()


def _outputs(task: str) -> int:
    return {"regression": 1, "multilabel": 3}.get(task, 2)


def square(outputs: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the outputs and of what the model got of the table."""
    return (outputs[:, 0] - batch["y"]) ** 2 + 0.1 * outputs[:, 0] * batch["table"][:, 0]


def test_a_loss_of_a_script_gets_the_inputs_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of the whole set; then predictions and metrics of the run, and the transform of its inputs."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(2)
    data, net, alone = two_inputs.fields(), two_inputs.Net().double(), two_inputs.Net().double()
    alone.load_state_dict(net.state_dict())
    image, table = by_hand(data, is_standardized=True)
    y = torch.tensor(data["y"])

    def loss_by_hand(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return square(outputs, {"y": y, "table": table}).mean()

    keys = {"speed.precision": "fp64", "batch.size": 23, "max_steps": 1, "optim.base_lr": 0.1, "optim.momentum": 0.0, "run": "run"}
    metrics = {"first": (lambda outputs, batch: batch["table"][:, 0] + batch["image"].sum((1, 2, 3)), "min")}
    job: dict[str, Any] = {"model": net, "train_data": data, "val_data": data, "loss": square, "metrics": metrics}
    run = hvdtrain.train(keys, "task.standardize=true", **job)
    stepped(alone, (image, table), y, loss_by_hand, 0.1)
    for found, expected in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    outputs = alone(image, table).detach()
    two = {"image": data["image"], "table": torch.tensor(data["table"])}
    np.testing.assert_allclose(hvdtrain.predict(run, two), outputs, rtol=1e-12)
    val = hvdtrain.evaluate(run, data)
    expected_first = (table[:, 0] + image.sum((1, 2, 3))).mean().item()
    assert val == pytest.approx({"loss": loss_by_hand(outputs, y).item(), "first": expected_first}, rel=1e-12, abs=1e-13)
    changed = run.transform(two)
    np.testing.assert_allclose(changed["image"], image, rtol=1e-12)
    torch.testing.assert_close(changed["table"], table, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(net(torch.tensor(changed["image"]), changed["table"]), outputs, rtol=1e-12, atol=1e-13)
    with pytest.raises(UserError, match=r"trained on the fields image, table; table is missing"):
        run.transform({"image": data["image"]})
    with pytest.raises(UserError, match=r"the model takes table float64 \(3,\), the data have image, y"):
        hvdtrain.predict(run, {"image": data["image"], "y": data["y"]})


def weights_of(run: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = files.read_arrays(files.finished(Path(run))[-1], 2**20)
    return found


def test_every_kind_of_data_is_one_job_stopped_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        np.savez(f"{split}.npz", **two_inputs.fields(split))
    job = ["task.name=regression", "guard.equal_steps=null", *WORDS]
    ways = {
        "arrays": ["data.name=two_inputs:fields", "model.name=two_inputs:Net"],
        "nested": ["data.name=two_inputs:nested", "model.name=two_inputs:OfDict"],
        "flat": ["data.name=two_inputs:flat", "model.name=two_inputs:Net", "data.workers=1"],
        "npz": ["data.name=npz", "data.root=.", "data.fields={image: image, table: table, y: y}", "model.name=two_inputs:Net"],
    }
    for run, words in ways.items():
        assert main([*words, *job, f"run={run}", "max_steps=9"]) == 0
    for run, more in (("parts", "max_steps=4"), ("parts", "max_steps=9")):
        assert main([*ways["arrays"], *job, f"run={run}", more, "resume=auto"]) == 0
    first = weights_of("arrays")
    for run in [*ways, "parts"]:
        for name, array in weights_of(run).items():
            assert np.array_equal(array, first[name]), (run, name)
