"""Regression of maps: layouts of channels, losses, gradients and metrics beside NumPy and torch on
1 to 3 ranks, statistics by channel, whole jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rank_threads import in_threads
from ranks import needs_extra

import hvdtrain
from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.config.read import configure
from hvdtrain.core.extras import maps, maps_module
from hvdtrain.core.metrics import add_sums, zero_sums
from hvdtrain.core.progress import Hyper
from hvdtrain.data.array_files import ReadingRanks
from hvdtrain.data.field import Field
from hvdtrain.data.source import NamedArrays
from hvdtrain.errors import UserError
from hvdtrain.extras.science.stored.statistics import mean_and_std
from hvdtrain.tasks import regression
from hvdtrain.tasks.maps import maps_of
from hvdtrain.training.build import build_learner, restore_task

UNET = ["model.name=unet", "model.widths=[4,6]", "model.norm=group", "model.groups=2"]
WORDS = ["task.name=regression", "speed.precision=fp64", "optim.name=sgd"]
SHARES = {1: [0, 12], 2: [0, 9, 12], 3: [0, 1, 3, 12]}  # where the ranks' samples begin and end
NUMBER = np.random.default_rng(3)
X = NUMBER.normal(5.0, 3.0, (12, 3, 4, 8)) * np.array([1.0, 10.0, 0.1])[:, None, None]
Y = NUMBER.normal(-2.0, 1.5, (12, 2, 4, 8))


def in_layout(array: np.ndarray, layout: str) -> np.ndarray:
    """(n, C, H, W) in another layout; none: the first channel."""
    if layout == "none":
        return array[:, 0]
    return np.moveaxis(array, 1, -1) if layout == "last" else array


def maps_task(x: np.ndarray, y: np.ndarray, **options: Any) -> Any:
    source = NamedArrays({"x": x, "y": y})
    return regression.build("regression", source, source, "task.name", **options)


def learner_of(task: Any, communicator: Communicator, *words: str) -> Any:
    model = UNET if "model.name=linear" not in words else []
    return build_learner(configure(None, [*WORDS, *model, *words]), task, communicator)


@pytest.mark.in_turn
@pytest.mark.parametrize("loss", ["squared_error", "absolute_error"])
def test_steps_of_maps_are_those_of_torch_on_any_number_of_ranks(loss: str) -> None:
    """By hand, x (C, H, W) is standardized by channel; all layouts are the same job."""
    options = {"standardize": "channel", "loss": loss}
    mean, std = (of(X, axis=(0, 2, 3), keepdims=True) for of in (np.mean, np.std))
    x = torch.tensor((X - mean) / std)
    alone = learner_of(maps_task(X, Y, **options), SingleProcessCommunicator())
    model = alone.model
    first = {name: array.copy() for name, array in alone.state().items()}
    for _ in range(2):
        error = model(x) - torch.tensor(Y)
        total = (error.square() if loss == "squared_error" else error.abs()).mean()
        gradients = torch.autograd.grad(total, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.sub_(gradient, alpha=0.3)
    expected = {f"p.{name}": p.detach().numpy() for name, p in model.named_parameters()}

    def trained(rank: Communicator, layout: str, *words: str) -> dict[str, np.ndarray]:
        of_layout = {"x": in_layout(X, layout), "y": in_layout(Y, layout)}
        one = learner_of(maps_task(**of_layout, **options), rank, *words)
        one.load(first)
        edges = SHARES[rank.size]
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        for step in range(2):
            micro = [
                one.to_device({name: array[part] for name, array in of_layout.items()})
                for part in (rows[:4], rows[4:])
            ]
            hyper = Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=12, step=step)
            one.step(micro, hyper, step)
        found: dict[str, np.ndarray] = one.state()
        return found

    found = [
        one
        for size in (1, 2, 3)
        for one in in_threads(size, lambda rank: trained(rank, ["first", "last"][rank.size % 2]))
    ]
    layout = "first" if loss == "squared_error" else "last"
    found += in_threads(1, lambda rank: trained(rank, layout, "framework=jax"))
    for one in found:
        for name, array in expected.items():
            np.testing.assert_allclose(one[name], array, rtol=1e-12, atol=1e-14)


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("layout", "framework"),
    [("first", "torch"), ("last", "torch"), ("none", "torch"), ("none", "jax")],
)
def test_metrics_are_over_the_points_of_each_channel(layout: str, framework: str) -> None:
    x, y = in_layout(X, layout), in_layout(Y, layout)
    names = ("only",) if layout == "none" else ("u", "v")
    task = maps_task(x, y, channels=layout, by_channel=names)
    one = learner_of(task, SingleProcessCommunicator(), f"framework={framework}")
    sums = zero_sums(task.sums)
    outputs = []
    for rows in (slice(0, 11), slice(11, 12)):
        batch = one.to_device({"x": x[rows], "y": y[rows]})
        sums = add_sums(sums, one.evaluate(batch))
        outputs.append(one.predict(batch).outputs)
    predicted = np.concatenate(outputs)
    assert predicted.shape == y.shape
    total = allreduce_sums(SingleProcessCommunicator(), sums, "test", task.sums)
    found = {metric.name: metric.of(total) for metric in task.metrics}
    channel = {"first": 1, "last": 3}.get(layout)
    others = tuple(axis for axis in range(y.ndim) if axis != channel)
    squares = (predicted - y) ** 2
    spread = ((y - y.mean(others, keepdims=True)) ** 2).sum(others)
    expected = {
        "loss": squares.mean(),
        "mse": squares.mean(),
        "mae": np.abs(predicted - y).mean(),
        "r2": (1 - squares.sum(others) / spread).mean(),
        **{
            f"mse_{name}": of
            for name, of in zip(names, np.ravel(squares.mean(others)), strict=True)
        },
    }
    assert found == pytest.approx(expected, rel=1e-12)
    assert total["count"] == 12


@pytest.mark.parametrize(
    ("x", "y", "channels", "layouts"),
    [
        ((3, 4, 8), (2, 4, 8), None, ["first", "first"]),
        ((4, 8, 3), (4, 8, 2), None, ["last", "last"]),
        ((3, 4, 8), (4, 8), None, ["first", "none"]),
        ((4, 8, 3), (4, 8), None, ["last", "none"]),
        ((3, 8, 8), (3, 8, 8), None, ["first", "first"]),
        ((8, 8, 3), (8, 8, 3), None, ["last", "last"]),
        ((8, 8, 8), (8, 8), None, ["first", "none"]),
        ((8, 8, 8), (8, 8), "last", ["last", "none"]),
        ((4, 8), (4, 8), "none", ["none", "none"]),
        ((4, 8), (4, 8), None, None),  # a row of pairs, perhaps
        ((3, 4, 8), (2, 4, 9), None, None),
    ],
)
def test_layouts_are_those_that_the_shapes_fit(
    x: Any, y: Any, channels: Any, layouts: list[str] | None
) -> None:
    found = maps_of(Field("float32", x), Field("float32", y), channels)
    assert (None if found is None else found.facts) == layouts


def test_images_have_their_channels_last() -> None:
    image = Field("uint8", (4, 8, 3))
    for y, layout in (((2, 4, 8), "first"), ((4, 8, 2), "last"), ((4, 8), "none")):
        found = maps_of(image, Field("float32", y), None)
        assert found is not None and found.facts == ["last", layout]
    task = maps_task((X[:, :3] % 200).astype(np.uint8).transpose(0, 2, 3, 1), Y)
    one = learner_of(task, SingleProcessCommunicator())
    batch = {"x": (X[:, :3] % 200).astype(np.uint8).transpose(0, 2, 3, 1), "y": Y}
    assert one.predict(one.to_device(batch)).outputs.shape == Y.shape


def test_a_layout_that_was_guessed_is_in_the_header() -> None:
    x = NUMBER.normal(size=(4, 8, 8, 8))
    task = maps_task(x, x[:, 0])
    assert task.notes == (
        "x (8, 8, 8) and y (8, 8) are read with their channels first; task.channels=last reads "
        "them with their channels last",
    )
    assert maps_task(x, x[:, 0], channels="last").notes == () and maps_task(X, Y).notes == ()
    assert task.summary == "8x8x8 float64 -> 8x8 float64, maps of 8x8 points, 8 -> 1 channels"


@pytest.mark.parametrize(
    ("x", "y", "options", "message"),
    [
        (X, Y[:, :, :3], {}, r"maps to maps, but x float64 \(3, 4, 8\) and y float64 \(2, 3, 8\)"),
        (X, Y[:, 0, 0, 0], {}, "are not maps of the same points"),
        (X[:, 0], Y[:, 0], {}, "are not maps of the same points"),
        (X, Y, {"channels": "last"}, r"task\.channels=last does not fit x float64 \(3, 4, 8\)"),
        (X, Y[:, 0, 0, 0], {"channels": "first"}, r"task\.channels=first does not fit"),
        (X[:, 0], Y[:, 0], {"standardize": "channel"}, r"task\.standardize=channel needs maps"),
        (X, Y, {"by_channel": ("u",)}, r"task\.by_channel=\['u'\] does not fit the 2 channels"),
        (X, Y, {"by_channel": ("u", "u")}, r"task\.by_channel=\['u', 'u'\] does not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(x: Any, y: Any, options: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        learner_of(maps_task(x, y, **options), SingleProcessCommunicator())


def test_augmentation_that_would_move_x_alone_is_refused() -> None:
    images = (X % 200).astype(np.uint8).transpose(0, 2, 3, 1)
    data = {"train_data": {"x": images, "y": Y}, "val_data": {"x": images, "y": Y}}
    config = {"task.name": "regression", "model.name": "unet", "augment.flip": True}
    with pytest.raises(UserError, match=r"augment\.flip moves the pixels of x, but not the maps y"):
        hvdtrain.train(config, **data)


class PixelNet(torch.nn.Module):
    """A user's net of channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class TurnedNet(PixelNet):
    """A user's net that returns (n, C, H, W) for x and y with channels last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).permute(0, 3, 1, 2)


@needs_extra("trained_models")
@pytest.mark.parametrize("net", [PixelNet, TurnedNet])
def test_a_job_with_channels_last_trains_evaluates_and_predicts(tmp_path: Path, net: Any) -> None:
    x, y = in_layout(X, "last"), in_layout(Y, "last")
    config = {
        "task.name": "regression",
        "task.standardize": "channel",
        "speed.precision": "fp64",
        "batch.size": 4,
        "max_steps": 3,
        "run": f"{tmp_path}/run",
    }
    torch.manual_seed(0)
    data = {"train_data": {"x": x, "y": y}, "val_data": {"x": x[:5], "y": y[:5]}}
    run = hvdtrain.train(config, model=net(), **data)
    transformed = run.transform(x)
    mean, std = (of(x, axis=(0, 1, 2)) for of in (np.mean, np.std))
    np.testing.assert_allclose(transformed, (x - mean) / std, rtol=1e-12)
    predicted = hvdtrain.predict(f"{tmp_path}/run", {"x": x[:5]}, model=net())
    assert predicted.shape == (5, *y.shape[1:])
    assert run.last == pytest.approx(((predicted - y[:5]) ** 2).mean(), rel=1e-12)


@pytest.mark.parametrize("channels", ["first", "none", "last"])
def test_statistics_of_files_are_exact_by_channel_on_any_number_of_ranks(channels: Any) -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, (700, 3, 40, 50))
    shape = (3, 40, 50) if channels != "none" else (40, 50)
    stored = values if channels != "none" else values[:, 0]

    def computed(rank: Communicator) -> np.ndarray:
        ranks = ReadingRanks(rank.rank, rank.size, rank.allreduce)
        return mean_and_std(lambda rows: stored[rows], len(stored), shape, ranks, channels)

    found = [one for size in (1, 3) for one in in_threads(size, computed)]
    kept_axis = {"first": 1, "last": 3}.get(channels)
    others = tuple(axis for axis in range(stored.ndim) if axis != kept_axis)
    expected = np.stack([stored.mean(others).ravel(), stored.std(others).ravel()])
    for one in found:
        assert one.tobytes() == found[0].tobytes()
        np.testing.assert_allclose(one, expected, rtol=1e-12)


@pytest.mark.parametrize("layout", ["first", "last", "none"])
def test_facts_make_a_task_of_maps_again(layout: str) -> None:
    options = {"channels": layout, "standardize": "channel", "by_channel": True}
    task = maps_task(in_layout(X, layout), in_layout(Y, layout), **options)
    facts = json.loads(json.dumps(task.facts()))
    config = configure(None, ["task.name=regression"])
    again = restore_task(config, facts)
    assert json.loads(json.dumps(again.facts())) == facts and again.sizes == task.sizes
    x = in_layout(X, layout)
    assert again.transform is not None
    np.testing.assert_array_equal(again.transform(x), task.transform(x))
    for name, wrong in (
        ("channels", ["first"]),
        ("channels", "ab"),
        ("target_mean", [1.0] * 9),
        ("by_channel", ["u"] * 9),
        ("by_channel", []),
        ("by_channel", None),
    ):
        with pytest.raises((TypeError, ValueError)):
            restore_task(config, facts | {name: wrong})
    with pytest.raises(ValueError, match="axis"):
        restore_task(config, facts | {"standardized_axis": "second"})


def test_targets_far_from_1_are_in_the_header() -> None:
    assert maps_task(X, Y).notes == ()
    y = Y * np.array([1.0, 3.0])[:, None, None] + np.array([0.0, 280.0])[:, None, None]
    (note,) = maps_task(X, y).notes
    assert note.startswith("y has values near 27")
    assert "so its squares are near 7.5e+04" in note


# gaps


def with_holes(array: np.ndarray, share: float) -> np.ndarray:
    """The array with NaN in some points; the first sample has only NaN, the second none."""
    drawn = np.random.default_rng(5).uniform(size=array.shape) < share
    drawn[0] = True
    drawn[1] = False
    return np.where(drawn, np.nan, array)


X_HOLES = with_holes(X, 0.2)
Y_HOLES = with_holes(Y, 0.4)
Y_HOLES[:, 1, :, :3] = np.nan


def gaps_task(**options: Any) -> Any:
    source = NamedArrays({"x": X_HOLES, "y": Y_HOLES}, gaps=frozenset({"x", "y"}))
    return regression.build("regression", source, source, "task.name", **options)


@pytest.mark.in_turn
@pytest.mark.parametrize("loss", ["squared_error", "absolute_error"])
def test_points_without_a_value_are_in_no_loss_on_any_number_of_ranks(loss: str) -> None:
    """Ranks have very different numbers of values, one of them none in a step."""
    axes = (0, 2, 3)
    mean, std = (of(X_HOLES, axis=axes, keepdims=True) for of in (np.nanmean, np.nanstd))
    x = torch.tensor(np.nan_to_num((X_HOLES - mean) / std))
    task = gaps_task(standardize="channel", loss=loss)
    alone = learner_of(task, SingleProcessCommunicator())
    model = alone.model
    first = {name: array.copy() for name, array in alone.state().items()}
    is_there = torch.tensor(~np.isnan(Y_HOLES))
    for _ in range(2):
        error = (model(x) - torch.tensor(np.nan_to_num(Y_HOLES)))[is_there]
        total = (error.square() if loss == "squared_error" else error.abs()).mean()
        gradients = torch.autograd.grad(total, list(model.parameters()))
        with torch.no_grad():
            for p, gradient in zip(model.parameters(), gradients, strict=True):
                p.sub_(gradient, alpha=0.3)
    expected = {f"p.{name}": p.detach().numpy() for name, p in model.named_parameters()}

    def trained(rank: Communicator, *words: str) -> dict[str, np.ndarray]:
        one = learner_of(task, rank, *words)
        one.load(first)
        edges = SHARES[rank.size]
        rows = np.arange(edges[rank.rank], edges[rank.rank + 1])
        for step in range(2):
            micro = [
                one.to_device({"x": X_HOLES[part], "y": Y_HOLES[part]})
                for part in (rows[:4], rows[4:])
            ]
            hyper = Hyper(lr=0.3, momentum=0.0, weight_decay=0.0, batch=12, step=step)
            one.step(micro, hyper, step)
        found: dict[str, np.ndarray] = one.state()
        return found

    found = [one for size in (1, 2, 3) for one in in_threads(size, trained)]
    if loss == "absolute_error":
        found += in_threads(2, lambda rank: trained(rank, "framework=jax"))
    for one in found:
        for name, array in expected.items():
            np.testing.assert_allclose(one[name], array, rtol=1e-12, atol=1e-14)


@pytest.mark.in_turn
@pytest.mark.parametrize("framework", ["torch", "jax", "numpy"])
def test_points_without_a_value_are_in_no_metric(framework: str) -> None:
    task = gaps_task(by_channel=True)
    words = ["model.name=linear"] if framework == "numpy" else []
    one = learner_of(task, SingleProcessCommunicator(), f"framework={framework}", *words)
    sums = zero_sums(task.sums)
    outputs = []
    for rows in (slice(0, 11), slice(11, 12)):
        batch = one.to_device({"x": X_HOLES[rows], "y": Y_HOLES[rows]})
        sums = add_sums(sums, one.evaluate(batch))
        outputs.append(one.predict(batch).outputs)
    predicted = np.concatenate(outputs).reshape(Y.shape)
    total = allreduce_sums(SingleProcessCommunicator(), sums, "test", task.sums)
    found = {metric.name: metric.of(total) for metric in task.metrics}
    squares = (predicted - Y_HOLES) ** 2
    of_channels = np.nanmean(Y_HOLES, axis=(0, 2, 3), keepdims=True)
    spread = np.nansum((Y_HOLES - of_channels) ** 2, axis=(0, 2, 3))
    expected = {
        "loss": np.nanmean(squares),
        "mse": np.nanmean(squares),
        "mae": np.nanmean(np.abs(predicted - Y_HOLES)),
        "r2": (1 - np.nansum(squares, axis=(0, 2, 3)) / spread).mean(),
        "mse_1": np.nanmean(squares[:, 0]),
        "mse_2": np.nanmean(squares[:, 1]),
    }
    assert found == pytest.approx(expected, rel=1e-12)
    assert task.weight({"y": Y_HOLES}) == np.count_nonzero(~np.isnan(Y_HOLES))


def test_numpy_has_the_gradient_of_points_with_a_value() -> None:
    y = np.array([[1.0, np.nan], [2.0, 3.0], [np.nan, np.nan]])
    x = np.array([[1.0, 2.0], [np.nan, 4.0], [5.0, 6.0]])
    source = NamedArrays({"x": x, "y": y}, gaps=frozenset({"x", "y"}))
    task = regression.build("regression", source, source, "task.name", standardize=False)
    assert task.fill is not None and task.fill.tolist() == [3.0, 4.0]
    hyper = Hyper(lr=0.1, momentum=0.0, weight_decay=0.0, batch=3)
    filled = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    error = np.nan_to_num(-y)
    for framework in ("numpy", "torch"):
        words = ["model.name=linear", f"framework={framework}"]
        one = learner_of(task, SingleProcessCommunicator(), *words)
        one.load({name: np.zeros_like(array) for name, array in one.state().items()})
        one.step([one.to_device({"x": x, "y": y})], hyper, 0)
        expected = -0.1 * 2 * error.T @ filled / 3
        np.testing.assert_allclose(one.state()["p.fc.weight"], expected, rtol=1e-12)


@needs_extra("trained_models")
def test_a_job_on_a_file_with_gaps_stores_what_replaces_them(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=X_HOLES, y=Y_HOLES)
    np.savez(tmp_path / "val.npz", x=X_HOLES[:5], y=Y_HOLES[:5])
    config = {
        "data.name": "npz",
        "data.root": str(tmp_path),
        "data.gaps": ["x", "y"],
        "task.name": "regression",
        "model.name": "unet",
        "model.widths": [4],
        "speed.precision": "fp64",
        "batch.size": 4,
        "max_steps": 2,
        "run": f"{tmp_path}/run",
    }
    run = hvdtrain.train(config)
    mean = np.nanmean(X_HOLES, axis=(0, 2, 3), keepdims=True)
    filled = np.where(np.isnan(X_HOLES), mean, X_HOLES)
    transformed = run.transform(X_HOLES)
    np.testing.assert_allclose(transformed, filled, rtol=1e-12)
    predicted = hvdtrain.predict(run, X_HOLES[:5])
    np.testing.assert_array_equal(predicted, hvdtrain.predict(run, transformed[:5]))
    assert run.last == pytest.approx(np.nanmean((predicted - Y_HOLES[:5]) ** 2), rel=1e-12)
    picture = tmp_path / "run" / "samples" / "maps-00000002.png"
    numbers = np.array([0, 1, 2, 4])
    names = ("channel 1", "channel 2")
    assert picture.exists() == (maps() is not None)
    if maps() is not None:
        shown = maps_module("shown_maps", "test")
        samples = shown.MapSamples(numbers, Y_HOLES[numbers], predicted[numbers], names)
        drawn = shown.picture_of_maps(samples)
        assert np.array_equal(np.asarray(Image.open(picture)), drawn)
    with pytest.raises(UserError, match="field x of sample 0 has nan"):
        hvdtrain.train(config | {"data.gaps": ["y"], "run": f"{tmp_path}/other"})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"data.gaps": ["z"]}, "data.gaps has z, but the data have x float64"),
        ({"data.gaps": ["y"], "task.name": "classification"}, "needs task.name=regression"),
    ],
)
def test_gaps_that_nothing_leaves_out_are_refused(words: dict[str, Any], message: str) -> None:
    data = {"x": X, "y": Y}
    config = {"task.name": "regression", "model.name": "unet", "batch.size": 4, **words}
    with pytest.raises(UserError, match=message):
        hvdtrain.train(config, train_data=data, val_data=data)


@pytest.mark.parametrize("channels", ["first", "none"])
def test_statistics_of_files_leave_out_what_is_missing(channels: Any) -> None:
    stored = X_HOLES if channels == "first" else X_HOLES[:, 0]
    ranks = ReadingRanks(0, 1, lambda array, name: array)
    shape = stored.shape[1:]
    found = mean_and_std(lambda rows: stored[rows], len(stored), shape, ranks, channels)
    others = (0, 2, 3) if channels == "first" else None
    expected = [np.ravel(np.nanmean(stored, others)), np.ravel(np.nanstd(stored, others))]
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-12)


# weights of points

LATITUDES = np.array([-67.5, -22.5, 22.5, 67.5])


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("layout", "has_gaps", "framework"),
    [
        ("first", False, "torch"),
        ("first", True, "jax"),
        ("last", True, "torch"),
        ("last", False, "jax"),
        ("none", True, "torch"),
    ],
)
def test_weighted_steps_and_metrics_are_those_of_numpy(
    layout: str, has_gaps: bool, framework: str
) -> None:
    """A linear model of all pixels, with the gradient of the weighted mean by hand; the sums of
    two ranks with different numbers of values."""
    rows = np.cos(np.deg2rad(LATITUDES))
    y = in_layout(Y_HOLES if has_gaps else Y, layout)
    images = in_layout(X, layout)
    gaps = frozenset({"y"} if has_gaps else ())
    source = NamedArrays({"x": images, "y": y}, gaps=gaps)
    options = {"weights": tuple(rows.tolist()), "channels": layout, "standardize": False}
    task = regression.build("regression", source, source, "task.name", **options)
    share = {"first": rows[:, None], "last": rows[:, None, None], "none": rows[:, None]}[layout]
    share = np.broadcast_to(share, y.shape) * ~np.isnan(y)
    flat = images.reshape(12, -1) * 0.01
    batch = {"x": images * 0.01, "y": y}
    error = -np.nan_to_num(y)
    gradient = (2 * share * error / share.sum()).reshape(12, -1).T @ flat

    def stepped(rank: Communicator, *words: str) -> dict[str, np.ndarray]:
        one = learner_of(task, rank, "model.name=linear", *words)
        one.load({name: np.zeros_like(array) for name, array in one.state().items()})
        edges = SHARES[rank.size]
        own = np.arange(edges[rank.rank], edges[rank.rank + 1])
        hyper = Hyper(lr=0.1, momentum=0.0, weight_decay=0.0, batch=12)
        one.step([one.to_device({name: array[own] for name, array in batch.items()})], hyper, 0)
        found: dict[str, np.ndarray] = one.state()
        return found

    found = [*in_threads(1, stepped), *in_threads(3, stepped)]
    found += in_threads(2, lambda rank: stepped(rank, "framework=numpy"))
    for one in found:
        np.testing.assert_allclose(one["p.fc.weight"], -0.1 * gradient, rtol=1e-12, atol=1e-15)
    # JAX flattens x of four axes as images, so it has the metrics of a net of maps
    alone = learner_of(task, SingleProcessCommunicator(), f"framework={framework}")
    sums = alone.evaluate(alone.to_device(batch))
    predicted = alone.predict(alone.to_device(batch)).outputs
    assert predicted.shape == y.shape
    total = allreduce_sums(SingleProcessCommunicator(), sums, "test", task.sums)
    metrics = {metric.name: metric.of(total) for metric in task.metrics}
    error = np.nan_to_num(predicted - y)
    channel = {"first": 1, "last": 3}.get(layout)
    others = tuple(axis for axis in range(y.ndim) if axis != channel)
    known = np.nan_to_num(y)
    counts = share.sum(others, keepdims=True)
    mean = (share * known).sum(others, keepdims=True) / counts
    spread = (share * (known - mean) ** 2).sum(others)
    expected = {
        "loss": (share * error**2).sum() / share.sum(),
        "mse": (share * error**2).sum() / share.sum(),
        "mae": (share * np.abs(error)).sum() / share.sum(),
        "r2": (1 - (share * error**2).sum(others) / spread).mean(),
    }
    assert metrics == pytest.approx(expected, rel=1e-11)
    facts = json.loads(json.dumps(task.facts()))
    again: Any = restore_task(configure(None, ["task.name=regression"]), facts)
    assert again.facts() == task.facts()
    for wrong in ([1.0], [[1.0], [2.0]], "x", [[-1.0]] * 4):
        with pytest.raises((TypeError, ValueError)):
            restore_task(configure(None, ["task.name=regression"]), facts | {"weights": wrong})


@needs_extra("trained_models")
def test_the_cosine_of_latitudes_in_a_file_weights_rows(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", x=X, y=Y, lat=LATITUDES, val=np.arange(12) > 8, day=np.arange(8))
    config = {
        "data.name": "npz",
        "data.root": f"{tmp_path}/all.npz",
        "data.fields": {"x": "x", "y": "y"},
        "data.split_by": "val",
        "data.split_val": [True],
        "task.name": "regression",
        "task.weights": "cos(lat)",
        "model.name": "unet",
        "model.widths": [4],
        "speed.precision": "fp64",
        "batch.size": 4,
        "max_steps": 2,
        "run": f"{tmp_path}/run",
    }
    run = hvdtrain.train(config)
    predicted = hvdtrain.predict(run, X[9:])
    rows = np.cos(np.deg2rad(LATITUDES))[:, None]
    squares = (predicted - Y[9:]) ** 2
    expected = (squares * rows).sum() / (2 * 3 * 8 * rows.sum())
    assert run.last == pytest.approx(expected, rel=1e-12)
    for wrong, message in (
        ("cos(latitude)", "no .*latitude.*it has"),
        ("cos(x)", "degrees of latitude|of shape"),
        ("lat", "are not weights"),
        ([1.0, 2.0, 3.0], r"of shape \(3,\), but maps have 4x8 points"),
    ):
        with pytest.raises(UserError, match=message):
            hvdtrain.train(config | {"task.weights": wrong, "run": f"{tmp_path}/other"})
    task = regression.build(
        "regression", *[NamedArrays({"x": X, "y": Y})] * 2, "", weights=(1.0, 2.0, 2.0, 3.0)
    )
    assert task.notes == (
        "task.weights=[1,2,2,...]: loss and metrics weight each row of the maps, by 0.5 to 1.5 of "
        "the mean",
    )
    with pytest.raises(UserError, match="needs maps x"):
        maps_task(X, Y[:, 0, 0, 0], weights=(1.0, 2.0))
    with pytest.raises(UserError, match="not in a file with such an array"):
        maps_task(X, Y, weights="cos(lat)")


# forecasts


@needs_extra("forecasts")
@needs_extra("trained_models")
def test_a_forecast_has_x_some_steps_later_as_its_target(tmp_path: Path) -> None:
    """From files and from arrays the same weights; each set has only pairs of its own years."""
    series = np.random.default_rng(1).normal(size=(40, 2, 4, 4)).cumsum(0) * 0.3
    series[4, 0, 0, 0] = np.nan
    year = np.repeat([2000, 2001, 2002, 2003], 10)
    np.savez(tmp_path / "all.npz", t=series, year=year)
    common = {
        "data.shift": 3,
        "data.gaps": ["x", "y"],
        "task.name": "regression",
        "task.standardize": "channel",
        "model.name": "unet",
        "model.widths": [4],
        "speed.precision": "fp64",
        "batch.size": 4,
        "epochs": 1,
    }
    of_files = {
        "data.name": "npz",
        "data.root": f"{tmp_path}/all.npz",
        "data.fields": {"x": "t"},
        "data.split_by": "year",
        "data.split_val": [2002],
    }
    run = hvdtrain.train(common | of_files | {"run": f"{tmp_path}/files"})
    validation = series[20:30]
    predicted = hvdtrain.predict(run, validation[:-3])
    assert run.last == pytest.approx(((predicted - validation[3:]) ** 2).mean(), rel=1e-12)
    train = np.concatenate([series[:17], series[30:37]])
    later = np.concatenate([series[3:20], series[33:]])
    mean = np.nanmean(train, (0, 2, 3), keepdims=True)
    expected = np.nan_to_num((series - mean) / np.nanstd(train, (0, 2, 3), keepdims=True))
    np.testing.assert_allclose(run.transform(series), expected, rtol=1e-11, atol=1e-12)
    pairs = {"train_data": (train, later), "val_data": (validation[:-3], validation[3:])}
    same = hvdtrain.train(common | {"data.shift": None, "run": f"{tmp_path}/pairs"}, **pairs)
    assert same.last == run.last
    arrays = {"train_data": {"x": series}, "val_data": {"x": validation}}
    whole = hvdtrain.train(common | {"run": f"{tmp_path}/arrays"}, **arrays)
    predicted = hvdtrain.predict(whole, validation[:-3])
    assert whole.last == pytest.approx(((predicted - validation[3:]) ** 2).mean(), rel=1e-12)
    for wrong, message in (
        ({"data.shift": 10}, "no two samples of a set are 10 apart"),
        ({"data.split_by": None, "data.split_val": None, "data.val_share": 0.2}, "at random"),
    ):
        words = {**common, **of_files, **wrong, "run": f"{tmp_path}/wrong"}
        with pytest.raises(UserError, match=message):
            hvdtrain.train(words)
