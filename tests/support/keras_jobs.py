"""framework=keras in one process, on the backend of KERAS_BACKEND: `OUT.json FOLDER` writes {check:
failure or ""}."""

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
from hvdtrain.frameworks.keras.objects import named_variables
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
    """A layer that contains layers, one of them with a name."""

    def __init__(self) -> None:
        super().__init__()
        self.one = keras.layers.Dense(4)
        self.two = keras.layers.Dense(4, name="last")

    def call(self, x: Any) -> Any:
        return self.two(self.one(x))


class Gated(keras.Model):
    """A subclass whose last layer is not the last operation."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.head = keras.layers.Dense(3)
        self.gate = keras.layers.Dense(8, activation="sigmoid")

    def call(self, x: Any) -> Any:
        return self.head(x * self.gate(x))


class Affine(keras.layers.Layer):
    """A dense layer whose variables have no names."""

    def __init__(self, units: int, **options: Any) -> None:
        super().__init__(**options)
        self.units = units

    def build(self, shape: Any) -> None:
        self.matrix = self.add_weight(shape=(shape[-1], self.units), initializer="glorot_normal")
        self.offsets = [self.add_weight(shape=(self.units,), initializer="zeros")]

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.matrix) + self.offsets[0]


class Penalty(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(x**2))
        return x


class OwnLoss(keras.Sequential):
    def compute_loss(self, *arguments: Any, **more: Any) -> Any:
        return super().compute_loss(*arguments, **more)


class OwnTest(keras.Sequential):
    def test_step(self, *arguments: Any) -> Any:
        return super().test_step(*arguments)


def own_loss(shape: tuple[int, ...], classes: int) -> Any:
    return OwnLoss([keras.layers.Input(shape), keras.layers.Flatten(), keras.layers.Dense(classes)])


def constrained(shape: tuple[int, ...], classes: int) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input(shape),
            layers.Flatten(),
            layers.Dense(classes, kernel_constraint=keras.constraints.MaxNorm(1.0)),
        ]
    )


def spectral(shape: tuple[int, ...], classes: int) -> Any:
    """With a layer that assigns the kernel of its inner layer in call()."""
    layers = keras.layers
    last = layers.SpectralNormalization(layers.Dense(classes), name="normed")
    return keras.Sequential([layers.Input(shape), layers.Flatten(), last])


def no_model(shape: tuple[int, ...]) -> int:
    return 3


def too_few(shape: tuple[int, ...]) -> Any:
    return keras.Sequential(
        [keras.layers.Input(shape), keras.layers.Flatten(), keras.layers.Dense(9)]
    )


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
    ours = arrays_of(resumed)
    theirs = arrays_of(straight)
    assert (
        ours.keys()
        == theirs.keys()
        == {
            *("conv2d.kernel", "conv2d.bias", "dense.kernel", "dense.bias"),
            *(
                f"batch_normalization.{part}"
                for part in ("gamma", "beta", "moving_mean", "moving_variance")
            ),
        }
    ), ours.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert straight.last > 0.8 and np.abs(ours["batch_normalization.moving_mean"]).max() > 0.01


def check_object_and_file(folder: Path) -> None:
    """A model object has the trained weights afterwards, and so has the file of Keras that is
    exported."""
    model = in_keras()
    run = train(folder / "object", "speed.precision=fp64", "optim.ema=0.8", model=model)
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
    found = np.asarray(keras.ops.convert_to_numpy(model(run.transform(x))))
    np.testing.assert_allclose(hvdtrain.predict(run, x, model=model), found, rtol=0, atol=1e-12)
    weights = model.get_weights()
    trained = train(
        folder / "named", "model.name=framework_jobs:in_keras", "speed.precision=fp64"
    ).weights
    assert {w.shape for w in weights} == {w.shape for w in trained.values()}
    to = folder / "model.keras"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert (
            hvdtrain_main(
                [
                    "export",
                    f"{folder / 'named'}",
                    "--to",
                    f"{to}",
                    "model.name=framework_jobs:in_keras",
                ]
            )
            == 0
        )
    assert "keras.saving.load_model" in said.getvalue()
    loaded = keras.saving.load_model(to)
    by_shape = {array.shape: array for array in trained.values()}
    assert all(np.array_equal(by_shape[w.shape], w) for w in loaded.get_weights())


def narrow(shape: tuple[int, ...], classes: int) -> Any:
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input(shape),
            layers.Dense(7),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(classes),
        ]
    )


def check_skipped_step(folder: Path) -> None:
    """A step whose loss is not finite leaves weights, running statistics and optimizer state to the
    last bit; another one changes all."""
    words = (
        "framework=keras model.name=keras_jobs:narrow speed.precision=fp64 guard.nonfinite=skip "
        "optim.name=sgd"
    )
    task = Classification((12,), 10, np.array([0.0]), np.array([1.0]), dtype="float32")
    learner = build_learner(configure(None, words.split()), task, SingleProcessCommunicator())
    x = np.random.default_rng(0).normal(size=(6, 12)).astype("float32")
    for step, wrong in enumerate((True, False)):
        before = learner.state()
        batch = {"x": x.copy(), "y": np.arange(6)}
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
        layers = [
            Twice(),
            keras.layers.Dense(2),
            Twice(),
            Affine(3),
            keras.layers.Dense(1, name="head"),
        ]
        model = keras.Sequential([keras.layers.Input((3,)), *layers])
        names.append([name for name, _ in named_variables(model)])
        assert len(names[-1]) == len(model.weights)
    of_twice = [f"{layer}.{part}" for layer in ("dense", "last") for part in ("kernel", "bias")]
    expected = [
        *(f"twice.{name}" for name in of_twice),
        "dense.kernel",
        "dense.bias",
        *(f"twice_1.{name}" for name in of_twice),
    ]
    assert (
        names[0]
        == names[1]
        == [*expected, "affine.matrix", "affine.variable", "head.kernel", "head.bias"]
    ), names


def penalized() -> Any:
    """With everything that layers of Keras add to a loss, and a constraint."""
    penalty = keras.regularizers.L2(0.05)
    make = keras.layers
    hidden = make.Dense(
        3,
        "tanh",
        kernel_regularizer=penalty,
        bias_regularizer=keras.regularizers.L1(0.01),
        activity_regularizer=penalty,
    )
    last = make.Dense(
        2,
        kernel_constraint=keras.constraints.MaxNorm(0.6),
        bias_constraint=keras.constraints.NonNeg(),
    )
    return keras.Sequential([make.Input((4,)), hidden, Penalty(), last])


def check_what_layers_add(folder: Path) -> None:
    """Weights, training losses and evaluation losses equal those of Keras' fit() and evaluate().
    Passes have unequal sizes."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    x = np.random.default_rng(0).normal(size=(40, 4))
    data = {"x": x, "y": (x.sum(1) > 0).astype("int64")}
    first = penalized()
    for framework in ["keras", *["torch"] * (keras.backend.backend() == "torch")]:
        job, by_keras = (keras.models.clone_model(first) for _ in range(2))
        for model in (job, by_keras):
            model.set_weights(first.get_weights())
        by_keras.compile(
            keras.optimizers.SGD(0.5, 0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            run_eagerly=True,
        )
        losses = by_keras.fit(
            data["x"], data["y"], batch_size=40, epochs=4, shuffle=False, verbose=0
        ).history["loss"]
        words = (
            "batch.size=40 batch.micro=16 batch.evaluate=16 epochs=4 optim.base_lr=0.5 "
            "optim.momentum=0.9 optim.weight_decay=0"
        )
        words += f" framework={framework} speed.precision=fp64 log.display=lines"
        run = hvdtrain.train(
            f"run={folder / framework}", *words.split(), model=job, train_data=data, val_data=data
        )
        for ours, theirs in zip(job.get_weights(), by_keras.get_weights(), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        assert np.linalg.norm(job.get_weights()[2], axis=0).max() <= 0.6 + 1e-6
        events = map(json.loads, (run.folder / "events.jsonl").read_text().splitlines())
        found = [event["train_loss"] for event in events if event["kind"] == "epoch"]
        np.testing.assert_allclose(found, losses, rtol=0, atol=1e-6)
        by_keras.evaluate(data["x"], data["y"], batch_size=16, verbose=0)
        assert (
            abs(
                hvdtrain.evaluate(run, data, model=job)["loss"]
                - by_keras.evaluate(x, data["y"], batch_size=16, verbose=0)
            )
            < 1e-6
        )


def check_objects_are_trained(folder: Path) -> None:
    """Trains a model whose variables have no names and do not exist before it is called. The header
    names what is not used."""
    model = OwnTest([keras.layers.Flatten(), Affine(10)])
    model.compile("adam", "mse")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        run = train(folder / "affine", "stop.steps=20", model=model)
    x = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1)).astype(np.uint8)
    found = np.asarray(keras.ops.convert_to_numpy(model(run.transform(x))))
    np.testing.assert_allclose(hvdtrain.predict(run, x, model=model), found, rtol=0, atol=1e-5)
    assert run.last > 0.5
    for line in (
        "not used: test_step() of OwnTest",
        "not used: compile(optimizer=Adam, loss=mse): the loss is that of the task",
    ):
        assert line in said.getvalue(), said.getvalue()


def check_what_is_refused(folder: Path) -> None:
    """Checks what, where and fix of the errors for unsupported jobs."""
    for words, what, fix in [
        (
            ["model.name=mlp"],
            "trains your own models, but model.name=mlp is a model of hvdtrain",
            "package.module:function",
        ),
        (
            ["model.name=keras_jobs:no_model"],
            "returned a int, not a keras.Model",
            "keras.Sequential",
        ),
        (
            ["model.name=keras_jobs:too_few"],
            "the model returns (2, 9), not logits (2, 10)",
            "without softmax",
        ),
        (
            ["model.name=keras_jobs:flat_alone"],
            "the model fails for inputs (2, 8, 8, 1) of float32",
            "the model gets (n, 8, 8, 1)",
        ),
        (
            ["model.name=keras_jobs:own_loss"],
            "OwnLoss has its own compute_loss(), which hvdtrain.train() does not call",
            "add_loss()",
        ),
        (
            ["model.name=keras_jobs:normed", "shard.stage=1"],
            "framework=keras does not support shard.stage=1",
            "framework=torch",
        ),
        (["model.name=keras_jobs:normed", "optim.name=torch.optim.SGD"], "", ""),
        (
            ["model.name=keras_jobs:normed", "framework=jax"],
            "returned a Sequential, not a pair of functions",
            "framework=keras with KERAS",
        ),
        *[
            (
                ["model.name=keras_jobs:normed", "framework=torch", "optim.name=muon"],
                "expects the outputs of a matrix on its first axis",
                "framework=keras",
            )
        ]
        * (keras.backend.backend() == "torch"),
        *[
            (
                ["model.name=keras_jobs:constrained", "framework=torch", "shard.stage=1"],
                "dense.kernel of the model has a constraint",
                "leave",
            )
        ]
        * (keras.backend.backend() == "torch"),
        *[
            (
                ["model.name=keras_jobs:spectral", f"framework={framework}"],
                "call() of a layer assigns to the trainable variable normed.kernel",
                "KERAS_BACKEND=jax",
            )
            for framework in ("keras", "torch")
            if keras.backend.backend() in ("torch", "tensorflow" if framework == "keras" else "")
        ],
    ]:
        try:
            train(folder / "refused", *words)
        except UserError as error:
            assert what in error.what and fix in error.fix, f"{error}"
        else:
            raise AssertionError(f"{words} runs")
    masks = {"x": np.zeros((4, 8, 8, 1), np.uint8), "y": np.arange(256).reshape(4, 8, 8) % 2}
    try:
        train(
            folder / "refused",
            "model.name=keras_jobs:too_few",
            "task.name=segmentation",
            "batch.size=4",
            train_data=masks,
            val_data=masks,
        )
    except UserError as error:
        assert "does not support framework=keras" in error.what, f"{error}"
    else:
        raise AssertionError("segmentation runs")
    keras.config.set_dtype_policy("float32")
    wrong = [
        (["speed.precision=fp64"], "the model computes in float32"),
        (["framework=jax"], "the job has framework=jax"),
    ]
    if keras.backend.backend() != "torch":
        wrong.append((["framework=torch"], "but framework=torch needs torch"))
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

        arrays = [
            np.asarray(keras.ops.convert_to_numpy(v.value))
            for v in training.model.trainable_variables
        ]
        self.norms.append(float(sum((array.astype(np.float64) ** 2).sum() for array in arrays)))


def check_what_call_assigns(folder: Path) -> None:
    """On JAX it is of one call, in a job as in fit(): the same weights, and a line says so."""
    if keras.backend.backend() != "jax":
        return
    x = np.random.default_rng(0).normal(size=(40, 4))
    data = {"x": x, "y": (x.sum(1) > 0).astype("int64")}
    job = spectral((4,), 2)
    by_keras = keras.models.clone_model(job)
    by_keras.set_weights(job.get_weights())
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    by_keras.compile(keras.optimizers.SGD(0.5), loss)
    by_keras.fit(x, data["y"], batch_size=40, epochs=3, shuffle=False, verbose=0)
    words = "batch.size=40 epochs=3 optim.base_lr=0.5 optim.momentum=0 optim.weight_decay=0"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        train(folder / "run", *words.split(), model=job, train_data=data, val_data=data)
    for ours, theirs in zip(job.get_weights(), by_keras.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    assert "not stored: what call() assigns to normed.kernel" in said.getvalue(), said.getvalue()


def check_a_softmax_is_said(folder: Path) -> None:
    """By framework=keras, and on torch by framework=torch too."""
    layers = keras.layers
    line = "the model ends in a softmax, and the loss of task.name=classification applies another"
    for activation in ("softmax", None):
        for framework in ["keras", *["torch"] * (keras.backend.backend() == "torch")]:
            dense = layers.Dense(10, activation=activation)
            model = keras.Sequential([layers.Input((8, 8, 1)), layers.Flatten(), dense])
            run = folder / f"{framework}-{activation}"
            with contextlib.redirect_stdout(io.StringIO()) as said:
                train(run, "stop.steps=1", f"framework={framework}", model=model)
            assert (line in said.getvalue()) == bool(activation), said.getvalue()
    draw = np.random.default_rng(0)
    data = {"x": draw.normal(size=(200, 8)), "y": draw.integers(0, 2, (200, 3))}
    i = keras.Input((8,))
    sigmoid = layers.Dense(3, activation="sigmoid")
    ending = keras.Sequential([layers.Input((8,)), sigmoid])
    line = "the model ends in a sigmoid, and the loss of task.name=multilabel applies another"
    for number, (model, is_said) in enumerate(
        (
            (ending, True),
            (keras.Model(i, ending(i)), True),
            (keras.Model(i, 4 * sigmoid(i)), False),
            (Gated(), False),
        )
    ):
        words = ["stop.steps=1", "task.name=multilabel"]
        with contextlib.redirect_stdout(io.StringIO()) as said:
            train(folder / f"{number}", *words, model=model, train_data=data, val_data=data)
        assert (line in said.getvalue()) == is_said, (number, said.getvalue())


def check_a_hook_sees_the_model(folder: Path) -> None:
    hook = KeepsNorm()
    run = train(folder / "run", "stop.steps=4", model=normed((8, 8, 1), 10), hooks=[hook])
    trained = sum(
        (array.astype(np.float64) ** 2).sum()
        for name, array in run.weights.items()
        if "moving" not in name
    )
    assert len(set(hook.norms)) == 4 and abs(hook.norms[-1] - trained) <= 1e-9 * trained, (
        hook.norms,
        trained,
    )


CHECKS: list[Callable[[Path], None]] = [
    check_a_hook_sees_the_model,
    check_what_call_assigns,
    check_a_softmax_is_said,
    check_names,
    check_skipped_step,
    check_resumed_bits,
    check_objects_are_trained,
    check_object_and_file,
    check_what_layers_add,
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
