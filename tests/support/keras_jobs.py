"""framework=keras in one process, on the backend of KERAS_BACKEND: `OUT.json FOLDER` writes {check: failure or ""}."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from framework_jobs import in_keras

import hvdtrain
from hvdtrain.__main__ import main as hvdtrain_main
from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.keras import named_variables
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

SHORT = "epochs=2 batch.size=100 log.display=lines optim.base_lr=0.1"


def normed(shape: tuple[int, ...], classes: int, drop: float = 0.3) -> Any:
    """With running statistics, and with layers that draw."""
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input(shape),
            layers.Conv2D(3, 3),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Flatten(),
            layers.Dropout(drop),
            layers.Dense(classes),
        ]
    )


class Twice(keras.layers.Layer):
    """Layers inside of a layer, one of which has a name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = keras.layers.Dense(4), keras.layers.Dense(4, name="last")

    def call(self, x: Any) -> Any:
        return self.two(self.one(x))


def no_model(shape: tuple[int, ...]) -> int:
    return 3


def too_few(shape: tuple[int, ...]) -> Any:
    return keras.Sequential([keras.layers.Input(shape), keras.layers.Flatten(), keras.layers.Dense(9)])


def flat_alone(shape: tuple[int, ...]) -> Any:
    return keras.Sequential([keras.layers.Input((7,)), keras.layers.Dense(10)])


def arrays_of(run: hvdtrain.Run) -> dict[str, np.ndarray]:
    return dict(run.weights)


def train(folder: Path, *words: str, **given: Any) -> hvdtrain.Run:
    return hvdtrain.train("framework=keras", f"run={folder}", *SHORT.split(), *words, **given)


def check_resumed_bits(folder: Path) -> None:
    """Statistics of norms and what dropout draws, at a resume in the middle of an epoch."""
    name = "model.name=keras_jobs:normed"
    straight = train(folder / "straight", name)
    train(folder / "resumed", name, "stop.steps=11")
    resumed = train(folder / "resumed", name, "stop.steps=null")
    assert resumed.steps == straight.steps == 29, (resumed, straight)
    ours, theirs = arrays_of(resumed), arrays_of(straight)
    assert (
        ours.keys()
        == theirs.keys()
        == {
            *("conv2d.kernel", "conv2d.bias", "dense.kernel", "dense.bias"),
            *(f"batch_normalization.{part}" for part in ("gamma", "beta", "moving_mean", "moving_variance")),
        }
    ), ours.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert straight.last > 0.8 and np.abs(ours["batch_normalization.moving_mean"]).max() > 0.01


def check_object_and_file(folder: Path) -> None:
    """A model object has the trained weights afterwards, and so has the file of Keras that is exported."""
    model = in_keras()
    run = train(folder / "object", "speed.precision=fp64", "optim.ema=0.8", model=model)
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
    found = np.asarray(keras.ops.convert_to_numpy(model(run.transform(x))))
    np.testing.assert_allclose(hvdtrain.predict(run, x, model=model), found, rtol=0, atol=1e-12)
    weights, trained = model.get_weights(), train(folder / "named", "model.name=framework_jobs:in_keras", "speed.precision=fp64").weights
    assert {w.shape for w in weights} == {w.shape for w in trained.values()}
    to = folder / "model.keras"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert hvdtrain_main(["export", f"{folder / 'named'}", "--to", f"{to}", "model.name=framework_jobs:in_keras"]) == 0
    assert "keras.saving.load_model" in said.getvalue()
    loaded = keras.saving.load_model(to)
    by_shape = {array.shape: array for array in trained.values()}
    assert all(np.array_equal(by_shape[w.shape], w) for w in loaded.get_weights())


def narrow(shape: tuple[int, ...], classes: int) -> Any:
    layers = keras.layers
    return keras.Sequential([layers.Input(shape), layers.Dense(7), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(classes)])


def check_skipped_step(folder: Path) -> None:
    """A step whose loss is not finite leaves weights, running statistics and optimizer state to the last bit; another one changes all."""
    words = "framework=keras model.name=keras_jobs:narrow speed.precision=fp64 guard.nonfinite=skip optim.name=sgd"
    task = Classification((12,), 10, np.array([0.0]), np.array([1.0]), dtype="float32")
    learner = build_learner(configure(None, words.split()), task, SingleProcessCommunicator())
    x = np.random.default_rng(0).normal(size=(6, 12)).astype("float32")
    for step, wrong in enumerate((True, False)):
        before, batch = learner.state(), {"x": x.copy(), "y": np.arange(6)}
        batch["x"][2] = np.nan if wrong else 0
        hyper = Hyper(lr=0.1, momentum=0.9, weight_decay=0.0, batch=6, step=step)
        assert learner.step([learner.to_device(batch)], hyper, 3)["nonfinite"] == wrong
        after = learner.state()
        same = {name for name in before if np.array_equal(before[name], after[name])}
        assert same == (before.keys() if wrong else set()), same


def check_names(folder: Path) -> None:
    """They do not depend on what the process has made before."""
    names = []
    for _ in range(2):
        model = keras.Sequential([keras.layers.Input((3,)), Twice(), keras.layers.Dense(2), Twice(), keras.layers.Dense(1, name="head")])
        names.append([name for name, _ in named_variables(model)])
        assert len(names[-1]) == len(model.weights)
    of_twice = [f"{layer}.{part}" for layer in ("dense", "last") for part in ("kernel", "bias")]
    expected = [*(f"twice.{name}" for name in of_twice), "dense.kernel", "dense.bias", *(f"twice_1.{name}" for name in of_twice)]
    assert names[0] == names[1] == [*expected, "head.kernel", "head.bias"], names


def check_what_is_refused(folder: Path) -> None:
    """What, where and fix of what cannot be."""
    for words, what, fix in [
        (["model.name=mlp"], "trains a model of yours, and model.name=mlp is hvdtrain's", "package.module:function"),
        (["model.name=keras_jobs:no_model"], "gave a int, not a keras.Model", "keras.Sequential"),
        (["model.name=keras_jobs:too_few"], "the model gives (2, 9), not logits (2, 10)", "without softmax"),
        (["model.name=keras_jobs:flat_alone"], "the model fails for inputs (2, 8, 8, 1) of float32", "the model gets (n, 8, 8, 1)"),
        (["model.name=keras_jobs:normed", "shard.stage=1"], "framework=keras does not support shard.stage=1", "framework=torch"),
        (["model.name=keras_jobs:normed", "optim.name=torch.optim.SGD"], "", ""),
        (["model.name=keras_jobs:normed", "framework=jax"], "gave a Sequential, not a pair of functions", "framework=keras with KERAS"),
        *[(["model.name=keras_jobs:normed", "framework=torch", "optim.name=muon"], "takes the first axis of a matrix", "framework=keras")]
        * (keras.backend.backend() == "torch"),
    ]:
        try:
            train(folder / "refused", *words)
        except UserError as error:
            assert what in error.what and fix in error.fix, f"{error}"
        else:
            raise AssertionError(f"{words} runs")
    keras.config.set_dtype_policy("float32")
    wrong = [(["speed.precision=fp64"], "the model has numbers of float32"), (["framework=jax"], "the job of framework=jax")]
    if keras.backend.backend() != "torch":
        wrong.append((["framework=torch"], "and framework=torch trains models of torch"))
    for words, what in wrong:
        try:
            train(folder / "refused", *words, model=normed((8, 8, 1), 10))
        except UserError as error:
            assert what in error.what, f"{error}"
        else:
            raise AssertionError(f"{words} runs")


class KeepsNorm(hvdtrain.Hook):
    """The norm of all weights of the model that it sees, after each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def after_step(self, training: Any) -> None:
        import keras

        arrays = [np.asarray(keras.ops.convert_to_numpy(v.value)) for v in training.model.trainable_variables]
        self.norms.append(float(sum((array.astype(np.float64) ** 2).sum() for array in arrays)))


def check_a_hook_sees_the_model(folder: Path) -> None:
    hook = KeepsNorm()
    run = train(folder / "run", "stop.steps=4", model=normed((8, 8, 1), 10), hooks=[hook])
    trained = sum((array.astype(np.float64) ** 2).sum() for name, array in run.weights.items() if "moving" not in name)
    assert len(set(hook.norms)) == 4 and abs(hook.norms[-1] - trained) <= 1e-9 * trained, (hook.norms, trained)


CHECKS: list[Callable[[Path], None]] = [
    check_a_hook_sees_the_model,
    check_names,
    check_skipped_step,
    check_resumed_bits,
    check_object_and_file,
    check_what_is_refused,
]


def main(out: str, folder: str) -> None:
    found = {}
    for check in CHECKS:
        try:
            check(Path(folder) / check.__name__)
            found[check.__name__] = ""
        except BaseException:
            found[check.__name__] = traceback.format_exc()
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
