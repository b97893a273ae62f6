"""Milliseconds of a training step in JAX, in one process: a plain loop, and hvdtrain with framework=jax, in turn.

python benchmarks/jax_step.py [--rounds 9] [--steps 20] [--json FILE]

Plain: jax.jit of value_and_grad and optax.sgd, the data on the device, batches by index, the loss read at the end of a block. Both train
an MLP on the digits from the same weights; before the timing their losses must be equal. hvdtrain's step also checks for NaN, reads
samples by its sampler, and has a sync point in each block.
"""  # noqa: E501

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from blocks import Trainer, in_turn, mean_loss, spread
from rows import append

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.training.health.signals import Signals

LR = 0.05
BATCH = 64
WIDTHS = {"small": (128,), "large": (2048, 2048)}


class Plain:
    """The loop that the documentations of JAX and Optax show."""

    def __init__(self, x: np.ndarray, y: np.ndarray, weights: dict[str, Any]) -> None:
        """x: (n, features), as the model takes them; weights: "LAYER.weight", (outputs, inputs),
        and "LAYER.bias"."""
        self.x = jnp.asarray(x)
        self.y = jnp.asarray(y)
        self.weights = weights
        self.layers = list(dict.fromkeys(name.split(".")[0] for name in weights))
        optimizer = optax.sgd(LR, momentum=0.9)
        self.state = optimizer.init(weights)
        self.random = np.random.default_rng(1)

        @jax.jit
        def step(weights: Any, state: Any, x: Any, y: Any) -> Any:
            loss, gradients = jax.value_and_grad(self.loss)(weights, x, y)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(weights, updates), state, loss

        self.step = step

    def loss(self, weights: Any, x: Any, y: Any) -> Any:
        for layer in self.layers:
            x = x @ weights[f"{layer}.weight"].T + weights[f"{layer}.bias"]
            x = jax.nn.relu(x) if layer != self.layers[-1] else x
        return optax.softmax_cross_entropy_with_integer_labels(x, y).mean()

    def block(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            rows = self.random.integers(len(self.y), size=BATCH)
            self.weights, self.state, loss = self.step(
                self.weights, self.state, self.x[rows], self.y[rows]
            )
        self.last_loss = float(loss)
        return time.perf_counter() - began


def measure(name: str, rounds: int, steps: int) -> dict[str, Any]:
    """A row of the results for one network."""
    job = [
        "framework=jax",
        "data.name=digits",
        "model.name=mlp",
        f"model.widths={list(WIDTHS[name])}",
        f"batch.size={BATCH}",
        "optim.name=sgd",
        f"optim.base_lr={LR}",
        "optim.momentum=0.9",
        "optim.weight_decay=0",
        "recipe.warmup=0",
        f"log.every_steps={steps}",
    ]
    with Signals(0) as signals:
        trainer = Trainer(job, SingleProcessCommunicator(), signals)
        learner: Any = trainer.job.learner
        source = trainer.datasets.train
        samples = source.read(np.arange(len(source)))
        transform = trainer.datasets.task.transform
        x = (samples["x"] / np.float32(255) - transform.mean) / transform.std
        weights = {
            name: jnp.array(array)
            for name, array in zip(learner.model.names, learner.weights, strict=True)
        }
        plain = Plain(x.reshape(len(x), -1).astype(np.float32), samples["y"], weights)
        sums = learner.evaluate(learner.to_device(source.read(np.arange(BATCH))))
        ours = float(sums["loss"]) / BATCH
        theirs = float(plain.loss(weights, plain.x[:BATCH], plain.y[:BATCH]))
        assert abs(ours - theirs) < 1e-5 * theirs, (ours, theirs)
        before = trainer.now.sums
        times = in_turn({"plain": plain.block, "hvdtrain": trainer.block}, rounds, steps)
        learned = mean_loss(before, trainer.now.sums)
    ratio, quartiles = spread(
        [ours / theirs for ours, theirs in zip(times["hvdtrain"], times["plain"], strict=True)], 3
    )
    return {
        "network": name,
        **{f"{k} ms": round(1e3 * statistics.median(v) / steps, 3) for k, v in times.items()},
        "ratio": ratio,
        "ratio_quartiles": quartiles,
        "losses": [round(plain.last_loss, 3), round(learned, 3)],
        "n": rounds,
        "steps": steps,
        "jax": jax.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    for name in WIDTHS:
        row = measure(name, options.rounds, options.steps)
        print(row)
        if options.json:
            append(options.json, row)


if __name__ == "__main__":
    main()
