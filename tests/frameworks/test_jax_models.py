"""wide_resnet and resnet* in JAX beside torch's, in float64: names, shapes, outputs, steps; and
their first weights."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax_norms_on_ranks import apart

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config import plugins
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.jax.layers import Functions
from hvdtrain.frameworks.jax.norm import BatchNorms
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

pytestmark = pytest.mark.usefixtures("jax_compilation_cache")

RESNETS = [pytest.param(18), pytest.param(34, marks=pytest.mark.slow), pytest.param(50)]
RESNETS += [pytest.param(depth, marks=pytest.mark.slow) for depth in (101, 152)]


def both(
    name: str, shape: tuple[int, int, int], **options: Any
) -> tuple[torch.nn.Module, Functions]:
    torch.manual_seed(1)
    torchs, jaxs = (
        plugins.load(f"frameworks/{framework}/models", name, "here")
        for framework in ("torch", "jax")
    )
    return torchs.build(name, shape, 5, **options).double(), jaxs.build(name, shape, 5, **options)


def by_jax(
    functions: Functions, state: dict[str, np.ndarray], x: np.ndarray, training: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Outputs and new buffers for x (n, H, W, C), operation by operation, which compiles less than
    the whole of a deep network."""
    norms = BatchNorms(configure(None, []).norm, functions.norms, SingleProcessCommunicator())
    with jax.enable_x64(True):
        flow = functions.apply(
            jax.tree.map(jax.numpy.asarray, state),
            jax.numpy.asarray(x),
            norms=norms.of_pass(len(x), training),
        )
        return np.asarray(flow.x), {name: np.asarray(array) for name, array in flow.buffers.items()}


@pytest.mark.in_turn
@pytest.mark.parametrize("small_images", [True, False])
@pytest.mark.parametrize("depth", RESNETS)
def test_a_resnet_is_torchvisions(depth: int, small_images: bool) -> None:
    """In evaluation with statistics that are not the initial ones, and in training, which moves
    them."""
    shape = (16, 12, 3) if small_images else (65, 49, 2)  # 2x2 pixels or 3x2 before the mean
    model, functions = both(f"resnet{depth}", shape, small_images=small_images)
    names = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert {name: array.shape for name, array in functions.init(jax.random.key(0)).items()} == names
    state = {name: t.detach().numpy().copy() for name, t in model.state_dict().items()}
    dice = np.random.default_rng(2)
    state |= {
        name: dice.uniform(0.5, 1.5, array.shape)
        for name, array in state.items()
        if "running" in name
    }
    model.load_state_dict({name: torch.from_numpy(array) for name, array in state.items()})
    x = dice.normal(size=(3, *shape))
    for training in (False, True):
        with torch.no_grad():
            expected = model.train(training)(
                torch.from_numpy(x.transpose(0, 3, 1, 2).copy())
            ).numpy()
        outputs, buffers = by_jax(functions, state, x, training)
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
    found = {name: t.numpy() for name, t in model.state_dict().items() if name in buffers}
    assert len(found) == 3 * len(functions.norms) and apart(buffers, found) < 1e-10


@pytest.mark.in_turn
@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ("model.name=wide_resnet model.widths=[4,4,6,8] model.dropout=0", 3),
        ("model.name=wide_resnet model.widths=[4,4,6,8] model.dropout=0 model.norm=false", 3),
        ("model.name=resnet18 model.small_images=true", 1),
        ("model.name=resnet14 model.zero_gamma=true", 3),
        ("model.name=resnet8 model.norm=false optim.name=lars", 3),
    ],
)
def test_a_step_is_torchs(words: str, steps: int) -> None:
    """Of residual blocks that are computed again in JAX; ReLU makes equal numbers, of which a
    pooling passes one gradient on."""
    task = Classification((8, 12, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
    jobs = ["framework=torch"], ["framework=jax", "model.recompute=2"]
    configs = [
        configure(None, [*job, "speed.precision=fp64", "batch.size=8", *words.split()])
        for job in jobs
    ]
    learners = [build_learner(config, task, SingleProcessCommunicator()) for config in configs]
    learners[1].load(learners[0].state())
    rng = np.random.default_rng(3)
    for number in range(steps):
        batch = {
            "x": rng.integers(0, 256, (7, *task.shape), dtype=np.uint8),
            "y": rng.integers(0, 3, 7),
        }
        hyper = Hyper(lr=0.1, momentum=0.9, weight_decay=0.01, batch=7, step=number)
        sums = [float(one.step([one.to_device(batch)], hyper, 3)["loss"]) for one in learners]
        assert sums[1] == pytest.approx(sums[0], rel=1e-10)
    assert apart(learners[1].state(), learners[0].state()) < 1e-10
    assert learners[1].state_dict_names() == learners[0].state_dict_names()


@pytest.mark.in_turn
def test_dropout_of_a_wide_resnet_drops_its_share() -> None:
    functions = both("wide_resnet", (8, 8, 1), dropout=0.5, widths=(4, 4, 4, 4))[1]
    norms = BatchNorms(configure(None, []).norm, functions.norms, SingleProcessCommunicator())
    params = functions.init(jax.random.key(0)) | norms.start()
    x = np.random.default_rng(1).normal(size=(4, 8, 8, 1)).astype(np.float32)
    a, again, other, without = (
        functions.apply(params, x, norms=norms.of_pass(4, training=True), key=key).x
        for key in (*map(jax.random.key, (1, 1, 2)), None)
    )
    assert (
        np.array_equal(a, again) and not np.array_equal(a, other) and not np.array_equal(a, without)
    )


@pytest.mark.in_turn
@pytest.mark.parametrize("small_images", [True, False])
def test_first_weights_of_a_resnet_follow_the_law_of_torchvisions(small_images: bool) -> None:
    model, functions = both("resnet18", (32, 32, 3), small_images=small_images, zero_gamma=True)
    params = functions.init(jax.random.key(0))
    for name, p in model.named_parameters():
        expected = p.detach().numpy()
        found = params[name]
        if p.numel() < 1000:
            assert name == "fc.bias" or np.array_equal(found, expected), name
        else:
            assert found.std() == pytest.approx(expected.std(), rel=0.08), name
            assert np.abs(found).max() == pytest.approx(np.abs(expected).max(), rel=0.5), name


@pytest.mark.parametrize(
    ("shape", "options", "what"),
    [
        ((8, 8, 1), {"widths": (4, 0, 4, 4)}, "are not valid"),
        ((8, 8, 1), {"dropout": 1.0}, "with dropout 1.0 are not valid"),
        ((3, 8, 1), {}, "images of 3x8 pixels cannot be halved twice"),
    ],
)
def test_impossible_wide_resnets_are_refused(
    shape: tuple[int, int, int], options: dict[str, Any], what: str
) -> None:
    with pytest.raises(UserError, match=what):
        plugins.load("frameworks/jax/models", "wide_resnet", "here").build(
            "wide_resnet", shape, 5, **options
        )
