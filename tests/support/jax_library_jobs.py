"""Objects of each library of JAX given to hvdtrain.train(), on the ranks of this start: `OUT.json
FOLDER` writes the accuracy of each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_libraries import CASES, made
from ranks import HIGHEST_STAGE

import hvdtrain

SHAPE = (3, 3, 1)
CLASSES = 3
WORDS = ["batch.size=25", "epochs=2", "log.display=lines", "log.every_steps=4"]


def data(seed: int, samples: int) -> dict[str, np.ndarray]:
    """Images whose class is the brightest of three columns."""
    x = np.random.default_rng(seed).integers(0, 256, (samples, *SHAPE), dtype=np.uint8)
    return {"x": x, "y": x.sum((1, 3), dtype=np.int64).argmax(1)}


def pair() -> tuple[Callable[..., Any], Callable[..., Any]]:
    def init(key: Any) -> dict[str, Any]:
        return {"w": 0.1 * jax.random.normal(key, (9, CLASSES))}

    return init, lambda params, x: x.reshape(len(x), -1) @ params["w"]


def of_pair(pytree: Any, x: Any) -> Any:
    return x.reshape(len(x), -1) @ pytree["w"]


MAKERS: dict[str, tuple[Callable[[], Any], Callable[[Any, Any], Any]]] = {
    **{
        name: (lambda name=name: made(name), case.reference.of_pytree)
        for name, case in CASES.items()
    },
    "pair": (pair, of_pair),
}


def train(folder: Path, name: str, model: Any) -> hvdtrain.Run:
    """By averaged weights, of equinox with parts of them on each rank; of a pair by an object of
    optax, whose state has no averages."""
    words, optimizer = (
        (["optim.base_lr=0.2", "optim.ema=0.5"], None) if name != "pair" else ([], optax.adam(0.05))
    )
    words += [HIGHEST_STAGE] if name == "equinox" else []
    sets = {"train_data": data(0, 330), "val_data": data(1, 90)}
    return hvdtrain.train(
        f"run={folder / name}", *WORDS, *words, model=model, optimizer=optimizer, **sets
    )


def check(name: str, folder: Path) -> float:
    """run.pytree computes what predict() does; an object of equinox stays as it was, one of nnx has
    the weights."""
    make, outputs = MAKERS[name]
    model = make()
    before = (
        [np.array(array) for array in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))]
        if name == "equinox"
        else []
    )
    run = train(folder, name, model)
    assert (run.pytree is model) == (name == "nnx")
    x = data(2, 31)["x"]
    expected = np.asarray(outputs(run.pytree, jnp.asarray(run.transform(x))))
    np.testing.assert_allclose(
        hvdtrain.predict(run, x, "shard.stage=0"), expected, rtol=0, atol=2e-6
    )
    assert run.steps == 27 and run.last > 0.6, (name, run)
    after = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)) if name == "equinox" else []
    assert all(map(np.array_equal, before, after)) and len(before) == 4 * (name == "equinox")
    return run.last


def main(out: str, folder: str) -> None:
    found = {name: check(name, Path(folder)) for name in MAKERS}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
