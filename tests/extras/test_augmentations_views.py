"""Test-time views: the formula against torch's own padding, on every framework, and what a learner
makes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.data.field import Field
from hvdtrain.errors import UserError
from hvdtrain.extras.augmentations.views import VIEWS, Views, make_views
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

SHAPE = (5, 4, 2)


def by_hand(x: np.ndarray, count: int, outputs: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The mean over the views of uint8 (n, H, W, C), as Jordan's evaluation nests it: of mirror
    images, then of the shifted images."""

    def both(images: np.ndarray) -> np.ndarray:
        return (outputs(images) + outputs(images[:, :, ::-1])) / 2

    if count == 2:
        return both(x)
    padded = torch.nn.functional.pad(
        torch.from_numpy(x).permute(0, 3, 1, 2).double(), (1, 1, 1, 1), mode="reflect"
    )
    corners = padded[:, :, :-2, :-2], padded[:, :, 2:, 2:]
    up, down = (both(corner.permute(0, 2, 3, 1).numpy().astype(np.uint8)) for corner in corners)
    return both(x) / 2 + (up + down) / 4


def images(n: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 256, (n, *SHAPE), dtype=np.uint8)


def test_the_weights_are_those_of_a_mean() -> None:
    for count, views in VIEWS.items():
        assert len(views) == count == len(set(views)) and sum(view.weight for view in views) == 1


@pytest.mark.parametrize("count", [2, 6])
@pytest.mark.parametrize("kind", ["numpy", "jax", "torch", "torch channels_last", "floats"])
def test_the_mean_over_the_views_by_hand(count: int, kind: str) -> None:
    x, weight = images(3), np.random.default_rng(4).normal(size=(*SHAPE, 6))

    def outputs(pixels: np.ndarray) -> np.ndarray:
        # no linear function: a mean of pixels would show
        return np.exp(np.einsum("nhwc,hwck->nk", pixels / 255.0, weight) / 9)

    def of(place: Callable[[Any], np.ndarray]) -> Callable[[Mapping[str, Any]], np.ndarray]:
        def outputs_of(arrays: Mapping[str, Any]) -> np.ndarray:
            assert arrays["y"] == 7, "what is not an image stays"
            return outputs(place(arrays["x"]))

        return outputs_of

    views = Views(VIEWS[count])
    if kind in ("numpy", "jax"):
        xp: Any = np if kind == "numpy" else jnp
        found = views.mean({"x": xp.asarray(x), "y": 7}, of(np.asarray), xp)
    elif kind == "floats":
        config = configure(None, [f"evaluate.views={count}"])
        views = make_views(config, {"x": Field("float32", (SHAPE[2], *SHAPE[:2]))})
        found = views.mean(
            {"x": x.transpose(0, 3, 1, 2), "y": 7}, of(lambda seen: seen.transpose(0, 2, 3, 1)), np
        )
    else:
        order = torch.channels_last if "last" in kind else torch.contiguous_format
        tensor = torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(memory_format=order)

        def of_tensor(seen: torch.Tensor) -> np.ndarray:
            assert seen.is_contiguous(memory_format=order), "convolutions would be slower"
            return seen.permute(0, 2, 3, 1).numpy()

        found = views.mean({"x": tensor, "y": 7}, of(of_tensor), torch, axes=(2, 3))
    np.testing.assert_allclose(found, by_hand(x, count, outputs), rtol=1e-14)


@pytest.mark.parametrize(
    "words",
    [
        "framework=numpy model.name=linear",
        "framework=jax model.name=mlp",
        "model.name=convnet model.widths=[3,4]",
    ],
)
def test_a_learner_says_the_mean_over_the_views_and_is_evaluated_by_it(words: str) -> None:
    task = Classification(SHAPE, 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
    x = images(7)
    y = np.array([0, 1, 2, 2, 1, 0, 1])
    learners = {}
    for count in (1, 6):
        config = configure(
            None, ["speed.precision=fp64", f"evaluate.views={count}", *words.split()]
        )
        learners[count] = build_learner(config, task, SingleProcessCommunicator())
    rng = np.random.default_rng(5)
    state = {
        name: rng.normal(size=array.shape) if name.startswith("p.") else array
        for name, array in learners[1].state().items()
    }
    for learner in learners.values():
        learner.load(state)

    def outputs(pixels: np.ndarray) -> np.ndarray:
        return (
            learners[1]
            .predict(learners[1].to_device({"x": np.ascontiguousarray(pixels), "y": y}))
            .outputs
        )

    expected = by_hand(x, 6, outputs)
    assert np.abs(expected - outputs(x)).max() > 1e-3
    found = learners[6].predict(learners[6].to_device({"x": x, "y": y}))
    np.testing.assert_allclose(found.outputs, expected, rtol=1e-12, atol=1e-13)
    likelihoods = np.exp(expected) / np.exp(expected).sum(1, keepdims=True)
    for sums in (found.sums, learners[6].evaluate(learners[6].to_device({"x": x, "y": y}))):
        assert float(sums["loss"]) == pytest.approx(
            -np.log(likelihoods[np.arange(7), y]).sum(), rel=1e-12
        )
        assert (float(sums["right"]), float(sums["count"])) == ((expected.argmax(1) == y).sum(), 7)


def test_views_are_of_images() -> None:
    config = configure(None, ["evaluate.views=6"])
    for field in (Field("float64", (7,)), Field("uint8", (1, 9, 3)), Field("float32", (3, 9, 1))):
        with pytest.raises(
            UserError,
            match="evaluate.views=6 needs images of at least 2 x 2 pixels; the data have x",
        ):
            make_views(config, {"x": field})
    assert make_views(configure(None, []), {}) == Views(), "one view is of anything"
