"""Small networks with the same first weights in every framework, trained by several recipes: on the
ranks of this start, one after the other. `FRAMEWORK OUT FOLDER JOB ...`: rank 0 writes the weights
that each job came to.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain

HIDDEN = 12
COMMON = (
    "epochs=2 batch.size=50 batch.evaluate=60 log.every_steps=5 log.display=lines "
    "speed.precision=fp64 optim.base_lr=0.1"
)
RECIPES = {
    "sgd": "optim.name=sgd optim.momentum=0.9 optim.weight_decay=0.001",
    "adamw": "optim.name=adamw optim.base_lr=0.01",
    "lars": "optim.name=lars optim.base_lr=1",
    "lamb": "optim.name=lamb optim.base_lr=0.01",
    "novograd": "optim.name=novograd optim.base_lr=0.01",
    "clipped": "optim.name=sgd optim.clip_norm=0.1 recipe.warmup=5steps",
    "smoothed": "optim.name=sgd model.label_smoothing=0.1 batch.micro=7",
    "mixed": "optim.name=sgd augment.mixup=0.4",
    "grown": "optim.name=sgd recipe.growth=milestones recipe.grow_at=[1] recipe.grow_to=[100]",
    "averaged": "optim.name=sgd optim.ema=0.9",
    "linear": "optim.name=adamw optim.base_lr=0.01 augment.mixup=0.4",
    "convnet": "optim.name=sgd optim.momentum=0.9",
    "muon": "optim.name=muon optim.base_lr=0.02 optim.rounds=4 optim.ema=0.9",
}
CONVNETS = "convnet", "muon"
# by layers of Keras; in torch by decay and the job's loss
PENALIZED = {"penalized": "optim.name=sgd optim.momentum=0.9 batch.micro=7"}
PENALTY = (
    2.0**-7
)  # in float32 too, in which TensorFlow has it: of the square of each weight, and of each output of a sample  # noqa: E501
# by layers of the same names
PASSED_ON = {"passed_on": "optim.name=adamw optim.base_lr=0.01 recipe.warmup=20steps optim.ema=0.9"}


ALL = RECIPES | PENALIZED | PASSED_ON


def first_weights(recipe: str) -> list[np.ndarray]:
    """Returns the initial weights of the layers in order: (outputs, inputs, ...), (outputs,)."""
    draw = np.random.default_rng(3).normal
    if recipe == "linear":
        return [np.zeros((10, 64)), np.zeros(10)]
    if recipe in CONVNETS:
        kernels = (
            draw(0, 0.3, (4, 1, 3, 3)),
            draw(0, 0.1, 4),
            draw(0, 0.3, (6, 4, 3, 3)),
            draw(0, 0.1, 6),
        )
        return [*kernels, draw(0, 0.3, (10, 6)), draw(0, 0.1, 10)]
    outputs = outputs_of(recipe)
    return [
        draw(0, 0.2, (HIDDEN, 64)),
        draw(0, 0.1, HIDDEN),
        draw(0, 0.2, (outputs, HIDDEN)),
        draw(0, 0.1, outputs),
    ]


def outputs_of(recipe: str) -> int:
    """In one of them more than there are classes."""
    return 11 if recipe == "smoothed" else 10


def in_torch(recipe: str) -> Any:
    import torch
    from torch import nn

    layers: dict[str, list[nn.Module]] = {
        "linear": [nn.Flatten(), nn.Linear(64, 10)],
        "convnet": [
            nn.Conv2d(1, 4, 3),
            nn.Tanh(),
            nn.Conv2d(4, 6, 3, stride=2),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(6, 10),
        ],
    }
    dense = OrderedDict[str, nn.Module](
        flat=nn.Flatten(),
        one=nn.Linear(64, HIDDEN),
        tanh=nn.Tanh(),
        two=nn.Linear(HIDDEN, outputs_of(recipe)),
    )
    network = "convnet" if recipe in CONVNETS else recipe
    net = nn.Sequential(*layers[network]) if network in layers else nn.Sequential(dense)
    with torch.no_grad():
        for p, weight in zip(net.double().parameters(), first_weights(recipe), strict=True):
            p.copy_(torch.from_numpy(weight))
    return net


def in_jax(recipe: str) -> Any:
    import jax
    import jax.numpy as jnp

    def init(key: Any) -> dict[str, Any]:
        given = [jnp.asarray(weight) for weight in first_weights(recipe)]
        names = ["one", "two", "three"]
        return {
            name: {"weight": given[2 * n], "bias": given[2 * n + 1]}
            for n, name in enumerate(names[: len(given) // 2])
        }

    def dense(params: Any, x: Any) -> Any:
        return x @ params["weight"].T + params["bias"]

    def convolved(params: Any, x: Any, stride: int) -> Any:
        kernel = params["weight"].transpose(2, 3, 1, 0)
        dimensions = ("NHWC", "HWIO", "NHWC")
        return (
            jax.lax.conv_general_dilated(
                x, kernel, (stride, stride), "VALID", dimension_numbers=dimensions
            )
            + params["bias"]
        )

    def apply(params: Any, x: Any) -> Any:
        if recipe in CONVNETS:
            return dense(
                params["three"],
                convolved(params["two"], jnp.tanh(convolved(params["one"], x, 1)), 2).mean((1, 2)),
            )
        return dense(params["two"], jnp.tanh(dense(params["one"], x.reshape(len(x), -1))))

    return init, apply


def in_keras(recipe: str = "") -> Any:
    import keras

    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    make = keras.layers
    penalty = keras.regularizers.L2(PENALTY)
    of_weights = {"kernel_regularizer": penalty, "bias_regularizer": penalty}
    networks: dict[str, list[Any]] = {
        "linear": [make.Flatten(), make.Dense(10)],
        "convnet": [
            make.Conv2D(4, 3, activation="tanh"),
            make.Conv2D(6, 3, 2),
            make.GlobalAveragePooling2D(),
            make.Dense(10),
        ],
        "penalized": [
            make.Flatten(),
            make.Dense(HIDDEN, "tanh", **of_weights),
            make.Dense(10, **of_weights, activity_regularizer=penalty),
        ],
        "passed_on": [
            make.Flatten(),
            rows(HIDDEN, name="one"),
            make.Activation("tanh"),
            rows(10, name="two"),
        ],
    }
    layers = networks.get(
        "convnet" if recipe in CONVNETS else recipe,
        [make.Flatten(), make.Dense(HIDDEN, activation="tanh"), make.Dense(outputs_of(recipe))],
    )
    model = keras.Sequential([make.Input((8, 8, 1)), *layers])
    model.set_weights(
        [
            weight if recipe == "passed_on" else as_in_keras(weight)
            for weight in first_weights(recipe)
        ]
    )
    return model


def penalized_loss(outputs: Any, batch: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(
        outputs, batch["y"], reduction="none"
    ) + PENALTY * outputs.square().sum(1)


def rows(units: int, name: str) -> Any:
    """A dense layer of Keras whose variables have the names and shapes of torch's."""
    import keras

    class Rows(keras.layers.Layer):
        def build(self, shape: Any) -> None:
            self.weight = self.add_weight(shape=(units, shape[-1]), name="weight")
            self.bias = self.add_weight(shape=(units,), name="bias")

        def call(self, x: Any) -> Any:
            return keras.ops.matmul(x, keras.ops.transpose(self.weight)) + self.bias

        def get_config(self) -> dict[str, Any]:
            return super().get_config()

    return Rows(name=name)


def as_in_keras(weight: np.ndarray) -> np.ndarray:
    """(outputs, inputs, height, width) -> (height, width, inputs, outputs)"""
    return weight.transpose(2, 3, 1, 0) if weight.ndim == 4 else weight.T


MAKERS = {"torch": in_torch, "jax": in_jax, "keras": in_keras, "keras by torch": in_keras}


def main(framework: str, out: str, folder: str, *jobs: str) -> None:
    found: dict[str, list[Any]] = {}
    for job in jobs:
        name, *words = job.split()
        recipe = [*COMMON.split(), *ALL[name].split(), *words]
        is_ours = name == "linear" and framework != "keras"
        model: dict[str, Any] = {} if is_ours else {"model": MAKERS[framework](name)}
        own = ["model.name=linear"] if is_ours else []
        if name in PENALIZED:
            own = [
                "optim.exclude=none",
                f"optim.weight_decay={0 if framework.startswith('keras') else 2 * PENALTY}",
            ]
            model |= {} if framework.startswith("keras") else {"loss": penalized_loss}
        run = hvdtrain.train(
            f"framework={framework.rsplit(maxsplit=1)[-1]}",
            f"run={folder}/{name}",
            *recipe,
            *own,
            **model,
        )
        found[name] = [weight.tolist() for weight in weights_of(run, name)]
        if run.rank == 0:
            Path(out).write_text(json.dumps(found))


def weights_of(run: hvdtrain.Run, recipe: str) -> Sequence[np.ndarray]:
    """Returns a run's weights in the form of first_weights()."""
    arrays = list(run.weights.values())
    by_shape = {
        array.shape: array
        for each in arrays
        for array in (each.transpose(3, 2, 0, 1) if each.ndim == 4 else each.T, each)
    }
    expected = first_weights(recipe)
    assert len(arrays) == len(expected), list(run.weights)
    return [by_shape[weight.shape] for weight in expected]


if __name__ == "__main__":
    main(*sys.argv[1:])
