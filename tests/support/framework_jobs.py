"""One small network with the same first weights in every framework, trained by several recipes: on the ranks of this start, one after the
other. `FRAMEWORK OUT FOLDER JOB ...`: rank 0 writes the weights that each job came to.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import hvdtrain

HIDDEN = 12
COMMON = "epochs=2 batch.size=50 batch.evaluate=60 log.every_steps=5 log.display=lines speed.precision=fp64 optim.base_lr=0.1"
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
}


def first_weights() -> list[np.ndarray]:
    """Of the two layers: (outputs, inputs), (outputs,)."""
    draw = np.random.default_rng(3).normal
    return [draw(0, 0.2, (HIDDEN, 64)), draw(0, 0.1, HIDDEN), draw(0, 0.2, (10, HIDDEN)), draw(0, 0.1, 10)]


def in_torch() -> Any:
    import torch

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, HIDDEN), torch.nn.Tanh(), torch.nn.Linear(HIDDEN, 10)).double()
    with torch.no_grad():
        for p, weight in zip(net.parameters(), first_weights(), strict=True):
            p.copy_(torch.from_numpy(weight))
    return net


def in_jax() -> Any:
    import jax.numpy as jnp

    def init(key: Any) -> dict[str, Any]:
        return {f"{number}": jnp.asarray(weight) for number, weight in enumerate(first_weights())}

    def apply(params: Any, x: Any) -> Any:
        return jnp.tanh(x.reshape(len(x), -1) @ params["0"].T + params["1"]) @ params["2"].T + params["3"]

    return init, apply


def in_keras() -> Any:
    import keras

    if keras.backend.backend() == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    layers = [keras.layers.Flatten(), keras.layers.Dense(HIDDEN, activation="tanh"), keras.layers.Dense(10)]
    model = keras.Sequential([keras.layers.Input((8, 8, 1)), *layers])
    model.set_weights([weight.T for weight in first_weights()])
    return model


MAKERS = {"torch": in_torch, "jax": in_jax, "keras": in_keras, "keras by torch": in_keras}


def main(framework: str, out: str, folder: str, *jobs: str) -> None:
    found: dict[str, list[Any]] = {}
    for job in jobs:
        name, *words = job.split()
        recipe = [*COMMON.split(), *RECIPES[name].split(), *words]
        run = hvdtrain.train(f"framework={framework.rsplit(maxsplit=1)[-1]}", f"run={folder}/{name}", *recipe, model=MAKERS[framework]())
        found[name] = [weight.tolist() for weight in weights_of(run, framework)]
        if run.rank == 0:
            Path(out).write_text(json.dumps(found))


def weights_of(run: hvdtrain.Run, framework: str) -> Sequence[np.ndarray]:
    """As first_weights() has them."""
    arrays = [array.T if framework.startswith("keras") else array for array in run.weights.values()]
    by_shape = {array.shape: array for array in arrays}
    assert len(arrays) == 4, list(run.weights)
    return [by_shape[weight.shape] for weight in first_weights()]


if __name__ == "__main__":
    main(*sys.argv[1:])
