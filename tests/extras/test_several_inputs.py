"""Models with several inputs: steps beside torch by hand on 1, 2 and 3 ranks, resumed and asked
checkpoints, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import two_inputs
from rank_threads import in_threads
from ranks import ROOT, mpirun, needs_extra, needs_mpirun
from torch.nn import functional

import hvdtrain
from hvdtrain.__main__ import main
from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.plugins import files as files_of_plugins
from hvdtrain.config.read import configure
from hvdtrain.core.extras import archives
from hvdtrain.core.progress import Hyper
from hvdtrain.data.field import Field
from hvdtrain.data.source import ArraySource
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.extras.trained_models.fit import fit
from hvdtrain.training.build import build_learner, restore_task
from hvdtrain.training.checkpoint import files
from hvdtrain.training.datasets import open_datasets

WORDS = ["speed.precision=fp64", "optim.name=sgd", "batch.size=7", "optim.base_lr=0.05"]
SHARES = {1: [0, 23], 2: [0, 15, 23], 3: [0, 2, 3, 23]}  # where the ranks' samples begin and end

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TASKS: dict[str, tuple[str, str, Loss]] = {  # data, model, the mean loss
    "regression": ("fields", "Net", lambda outputs, y: functional.mse_loss(outputs[:, 0], y)),
    "classification": ("classes", "Net", functional.cross_entropy),
    "multilabel": (
        "labels",
        "OfDict",
        lambda outputs, y: functional.binary_cross_entropy_with_logits(outputs, y.double()),
    ),
    "segmentation": ("masks", "OfPixels", functional.cross_entropy),
}


def words_of(task: str, *more: str) -> list[str]:
    data, model, _ = TASKS[task]
    inputs = ["data.inputs=[image,table]"] * (model == "OfDict")
    return [
        f"data.name=two_inputs:{data}",
        f"task.name={task}",
        f"model.name=two_inputs:{model}",
        *inputs,
        *WORDS,
        *more,
    ]


def by_hand(
    data: dict[str, np.ndarray], is_standardized: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model gets of the image and of the table."""
    pixels = data["image"] / 255
    table = data["table"]
    image = torch.tensor((pixels - pixels.mean()) / pixels.std()).permute(0, 3, 1, 2)
    return image, torch.tensor((table - table.mean(0)) / table.std(0) if is_standardized else table)


def outputs_by_hand(
    model: torch.nn.Module, image: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    found: torch.Tensor = (
        model({"image": image, "table": table})
        if isinstance(model, two_inputs.OfDict)
        else model(image, table)
    )
    return found


def stepped(
    model: torch.nn.Module,
    inputs: tuple[torch.Tensor, torch.Tensor],
    y: torch.Tensor,
    loss: Loss,
    lr: float,
) -> None:
    gradients = torch.autograd.grad(
        loss(outputs_by_hand(model, *inputs), y), list(model.parameters())
    )
    with torch.no_grad():
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.sub_(gradient, alpha=lr)


@pytest.mark.parametrize("name", [name for name in TASKS if name in files_of_plugins("tasks")])
def test_steps_are_those_of_torch_on_any_number_of_ranks(name: str) -> None:
    config = configure(None, words_of(name, *["task.standardize=true"] * (name == "multilabel")))
    train, _, task, *_ = open_datasets(config)
    data = getattr(two_inputs, TASKS[name][0])()
    first = {
        f"p.{key}": value.numpy()
        for key, value in getattr(two_inputs, TASKS[name][1])(_outputs(name))
        .double()
        .state_dict()
        .items()
    }

    def trained(rank: Communicator) -> dict[str, np.ndarray]:
        one = build_learner(config, task, rank)
        edges = SHARES[rank.size]
        one.load(one.state() | first)
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        for step in range(3):
            micro = [one.to_device(train.read(part)) for part in (rows[:4], rows[4:])]
            one.step(
                micro, Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=23, step=step), step
            )
        found: dict[str, np.ndarray] = one.state()
        return found

    model = getattr(two_inputs, TASKS[name][1])(_outputs(name)).double()
    model.load_state_dict(
        {key.removeprefix("p."): torch.tensor(value) for key, value in first.items()}
    )
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


def test_a_loss_of_a_script_gets_the_inputs_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step of the whole set; then predictions and metrics of the run, and the transform of its
    inputs."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(2)
    data = two_inputs.fields()
    net = two_inputs.Net().double()
    alone = two_inputs.Net().double()
    alone.load_state_dict(net.state_dict())
    image, table = by_hand(data, is_standardized=True)
    y = torch.tensor(data["y"])

    def loss_by_hand(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return square(outputs, {"y": y, "table": table}).mean()

    keys = {
        "speed.precision": "fp64",
        "batch.size": 23,
        "max_steps": 1,
        "optim.base_lr": 0.1,
        "optim.momentum": 0.0,
        "run": "run",
    }
    metrics = {
        "first": (
            lambda outputs, batch: batch["table"][:, 0] + batch["image"].sum((1, 2, 3)),
            "min",
        )
    }
    job: dict[str, Any] = {
        "model": net,
        "train_data": data,
        "val_data": data,
        "loss": square,
        "metrics": metrics,
    }
    run = hvdtrain.train(keys, "task.standardize=true", **job)
    stepped(alone, (image, table), y, loss_by_hand, 0.1)
    for found, expected in zip(net.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
    outputs = alone(image, table).detach()
    two = {"image": data["image"], "table": torch.tensor(data["table"])}
    np.testing.assert_allclose(hvdtrain.predict(run, two), outputs, rtol=1e-12)
    val = hvdtrain.evaluate(run, data)
    expected_first = (table[:, 0] + image.sum((1, 2, 3))).mean().item()
    assert val == pytest.approx(
        {"loss": loss_by_hand(outputs, y).item(), "first": expected_first}, rel=1e-12, abs=1e-13
    )
    changed = run.transform(two)
    np.testing.assert_allclose(changed["image"], image, rtol=1e-12)
    torch.testing.assert_close(changed["table"], table, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        net(torch.tensor(changed["image"]), changed["table"]), outputs, rtol=1e-12, atol=1e-13
    )
    with pytest.raises(UserError, match=r"trained on the fields image, table; table is missing"):
        run.transform({"image": data["image"]})
    with pytest.raises(
        UserError, match=r"the model takes table float64 \(3,\), the data have image, y"
    ):
        hvdtrain.predict(run, {"image": data["image"], "y": data["y"]})


def weights_of(run: str) -> dict[str, np.ndarray]:
    found: dict[str, np.ndarray] = files.read_arrays(files.finished(Path(run))[-1], 2**20)
    return found


@pytest.mark.skipif(".npz" not in archives(), reason="this copy reads no .npz")
def test_every_kind_of_data_is_one_job_stopped_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        np.savez(f"{split}.npz", **two_inputs.fields(split))
    job = ["task.name=regression", "guard.equal_steps=null", *WORDS]
    ways = {
        "arrays": ["data.name=two_inputs:fields", "model.name=two_inputs:Net"],
        "nested": ["data.name=two_inputs:nested", "model.name=two_inputs:OfDict"],
        "flat": ["data.name=two_inputs:flat", "model.name=two_inputs:Net", "data.workers=1"],
        "npz": [
            "data.name=npz",
            "data.root=.",
            "data.fields={image: image, table: table, y: y}",
            "model.name=two_inputs:Net",
        ],
    }
    for run, words in ways.items():
        assert main([*words, *job, f"run={run}", "max_steps=9"]) == 0
    for run, more in (("parts", "max_steps=4"), ("parts", "max_steps=9")):
        assert main([*ways["arrays"], *job, f"run={run}", more, "resume=auto"]) == 0
    first = weights_of("arrays")
    for run in [*ways, "parts"]:
        for name, array in weights_of(run).items():
            assert np.array_equal(array, first[name]), (run, name)


class Extra(two_inputs.Net):
    """Of one parameter more, which has a default."""

    def forward(self, image: torch.Tensor, table: torch.Tensor, weight: Any = None) -> torch.Tensor:
        return super().forward(image, table)


class NoTable(torch.nn.Module):
    def forward(self, image: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return image


def test_a_field_that_nothing_uses_is_told_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = {**two_inputs.fields(), "weight": np.ones(two_inputs.SAMPLES)}
    keys = {"task.name": "regression", "max_steps": 1, "batch.size": 4, "run": f"{tmp_path}/run"}
    hvdtrain.train(keys, model=Extra, train_data=data, val_data=data)
    shown = capsys.readouterr().out
    assert (
        "nothing uses the field weight; data.inputs=[image,table,weight] gives the model weight too"
        in shown
    )
    assert "inputs  image: (pixels / 255 - mean) / std by channel: mean 0." in shown
    assert (
        "table: x as the data have it, float64 as float32; task.standardize=true: (x - mean) / "
        "std of the training set" in shown
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "model.name=test_several_inputs:NoTable",
            "takes image, columns; the data have image, table, y, but not "
            r"columns\n.*\n.*data\.inputs=",
        ),
        (
            "data.inputs=[image,tabel]",
            r"data\.inputs names image, tabel; the data have .* not tabel\n.*\n  fix: did you mean "
            r"table\?",
        ),
        ("data.inputs=[image,image]", "names a field twice"),
        ("data.inputs=[image,y]", "y is the target"),
        (
            "data.inputs=[image] model.name=mlp",
            r"model\.name=mlp takes one input x, but the data provide image",
        ),
        (
            "model.name=mlp",
            r"the model takes one input x, but the data have image, table, y\n.*\n  fix: one "
            "field x; or framework=torch",
        ),
        (
            "model.name=two_inputs:OfDict",
            r"takes one input x.*\n.*\n  fix: data\.inputs=\[image,table\]",
        ),
        (
            "data.inputs=[image,table] framework=jax",
            "the inputs image, table needs framework=torch, but this is framework=jax",
        ),
        pytest.param(
            "parallel.pipeline=2",
            r"parallel\.pipeline only supports models with one input, but this one takes image, "
            "table",
            marks=needs_extra("pipeline"),
        ),
        pytest.param(
            "parallel.dense=b",
            r"parallel\.dense only supports models with one input",
            marks=needs_extra("dense"),
        ),
        ("augment.flip=true", r"augmentation needs images; .*\n.*\n.*or call the field image x"),
        pytest.param(
            "evaluate.views=2",
            "the data have no field x but image, table, y",
            marks=needs_extra("augmentations"),
        ),
        ("data.mean=[0.5] data.std=[0.2]", "the data have image, table, y, and no x"),
        (
            "task.name=language data.inputs=[image]",
            r"data\.inputs=\['image'\] has no effect: task\.name=language makes the inputs",
        ),
    ],
)
def test_what_does_not_fit_is_said_before_the_job(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_datasets(configure(None, [*words_of("regression"), *words.split()]))


@pytest.mark.skipif(".npz" not in archives(), reason="this copy reads no .npz")
def test_images_with_their_channels_first_are_turned_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = two_inputs.fields()
    turned = {**data, "image": data["image"].repeat(3, 3).transpose(0, 3, 1, 2)}
    np.savez("train.npz", **turned)
    np.savez("val.npz", **turned)
    assert as_source(turned, "mine", "here").fields["image"] == Field("uint8", (6, 5, 3))
    assert as_source(two_inputs.Flat(turned), "mine", "here", kept=("image",)).fields[
        "image"
    ] == Field("uint8", (6, 5, 3))
    files_of_arrays = [
        "data.name=npz",
        "data.root=.",
        "data.fields={image: image, table: table, y: y}",
    ]
    with pytest.raises(UserError, match=r"image is uint8 \(3, 6, 5\), but images are \(H, W, C\)"):
        open_datasets(configure(None, [*words_of("regression"), *files_of_arrays]))


def test_an_input_of_images_is_not_the_whole_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Colours are not taken for grey, and an image set alone is not evaluated."""
    monkeypatch.setattr(two_inputs, "classes", in_colour)
    monkeypatch.chdir(tmp_path)
    config = configure(None, words_of("classification"))
    opened = open_datasets(config)
    assert opened.task.notes_on_data(opened.train, opened.val, False) == []
    data = in_colour("val")
    for images, what in (
        (ArraySource(data["image"], data["y"], 2), "the model takes image uint8"),
        (ArraySource(data["image"][..., :1], data["y"], 2), "the model takes image uint8"),
    ):
        with pytest.raises(UserError, match=what):
            fit(images, opened.task, config)


def in_colour(split: str = "train") -> dict[str, np.ndarray]:
    image = np.random.default_rng(3).integers(0, 256, (two_inputs.SAMPLES, 6, 5, 3), np.uint8)
    y = np.arange(two_inputs.SAMPLES) % 2
    return {**two_inputs.fields(split), "image": image, "y": y}


def test_data_that_do_not_fit_each_other_are_told_of() -> None:
    data = two_inputs.fields()
    other = two_inputs.fields("val")
    job: dict[str, Any] = {"model": two_inputs.Net, "train_data": data}
    with pytest.raises(
        UserError,
        match=r"table is float64 \(3,\) in the training set, float64 \(2,\) in the validation set",
    ):
        hvdtrain.train(
            {"task.name": "regression"}, **job, val_data={**other, "table": other["table"][:, :2]}
        )
    with pytest.raises(
        UserError,
        match=r"the model fails for inputs image \(2, 1, 6, 5\), table \(2, 2\): .*\n.*\n.*table "
        r"float32 \(n, 2\)",
    ):
        narrow = {**data, "table": data["table"][:, :2]}
        hvdtrain.train(
            {"task.name": "regression", "batch.size": 4},
            model=two_inputs.Net,
            train_data=narrow,
            val_data=narrow,
        )
    with pytest.raises(UserError, match="augmentation applies to x, but the model takes table"):
        keys = {"task.name": "regression", "data.inputs": ["table"], "augment.flip": True}
        images = {"x": data["image"], "table": data["table"], "y": data["y"]}
        hvdtrain.train(keys, model=torch.nn.Linear(3, 1), train_data=images, val_data=images)
    with pytest.raises(UserError, match="has y both inside x and outside it"):
        hvdtrain.train(
            {"task.name": "regression"},
            model=two_inputs.OfDict,
            train_data={"x": data, "y": data["y"]},
            val_data=data,
        )


def test_the_configuration_of_two_inputs_learns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    assert (
        main(
            [
                f"--config={ROOT}/configs/two_inputs.yaml",
                "data.samples=1000",
                "epochs=6",
                "run=tanks",
            ]
        )
        == 0
    )
    assert hvdtrain.read("tanks")["val_r2"].dropna().iloc[-1] > 0.9


@needs_mpirun
@pytest.mark.slow
def test_a_job_that_goes_on_with_other_ranks_is_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped on one rank, to its end on three with parts of the optimizer's state; evaluated, and
    asked."""
    monkeypatch.chdir(tmp_path)
    job = [
        *words_of(
            "regression", "guard.equal_steps=null", "optim.momentum=0.9", "task.standardize=true"
        )
    ]
    for run, steps in (("whole", 9), ("parts", 4)):
        assert main([*job, f"run={run}", f"max_steps={steps}"]) == 0
    env = {"PYTHONPATH": f"{ROOT}:{ROOT}/tests/support"}
    end = [
        "-m",
        "hvdtrain",
        "resume=parts",
        *job[:3],
        "max_steps=9",
        "shard.stage=1",
        "comm.engine=mpi",
    ]
    done = mpirun(3, end, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    whole = weights_of("whole")
    parts = weights_of("parts")
    for name, array in whole.items():
        np.testing.assert_allclose(parts[name], array, rtol=1e-12, atol=1e-14)
    val = two_inputs.fields("val")
    words = ["model.name=two_inputs:Net"]
    one, other = (hvdtrain.evaluate(run, val, *words) for run in ("whole", "parts"))
    assert one == pytest.approx(other, rel=1e-11) and one["loss"] == pytest.approx(
        hvdtrain.read("whole")["val_loss"].dropna().iloc[-1]
    )
    np.testing.assert_allclose(
        *(hvdtrain.predict(run, val, *words) for run in ("whole", "parts")), rtol=1e-11
    )


class WithWeights(two_inputs.Flat):
    """With a field that has the name of the weights of losses in a batch."""

    def __getitem__(self, index: int) -> Any:
        return {**super().__getitem__(index), "w": float(index)}


def test_a_field_has_no_effect_by_its_name_alone(tmp_path: Path) -> None:
    """`w` are the weights of losses in a batch, of recipe.sample_noise."""
    data = two_inputs.fields()
    keys = {"task.name": "regression", "max_steps": 3, "batch.size": 4, "speed.precision": "fp64"}
    found = []
    for number, given in enumerate([data, {**data, "w": np.arange(23.0)}, WithWeights(data)]):
        run = hvdtrain.train(
            keys, f"run={tmp_path}/{number}", model=two_inputs.Net, train_data=given, val_data=given
        )
        found.append(run.weights)
    for other in found[1:]:
        assert all(np.array_equal(other[name], array) for name, array in found[0].items())
    given = {**data, "w": np.arange(23.0)}
    with pytest.raises(
        UserError,
        match=r"a field named w, but that name is reserved in a batch\n.*\n  fix: another name: "
        "w_of_sample",
    ):
        hvdtrain.train(
            keys,
            f"run={tmp_path}/w",
            model=two_inputs.Net,
            loss=square,
            train_data=given,
            val_data=given,
        )
