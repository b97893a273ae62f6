"""What the reduction costs a step of fit(): KERAS_BACKEND=torch|jax|tensorflow mpirun -np 2 python
benchmarks/horovod_keras.py [ROUNDS] [--json FILE]

Epochs of plain fit() of this rank's share, without other ranks; of the same with an allreduce of
one number after each batch, where each rank waits for the slowest; and of fit() with
hvdtrain.horovod.keras, in turn. Rank 0 appends a line to FILE: milliseconds a step, the slowest
rank's, median and quartiles, and the time of a reduction of the gradients alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rows import append

import hvdtrain.horovod.keras as hvd

STEPS = 20
BATCH = 32
REDUCTIONS = 100
WIDTHS = {"small": (32, 64, 64), "large": (512, 1024, 1024)}  # of an MLP's inputs and layers


class Wait(keras.callbacks.Callback):  # type: ignore[misc]
    """Waits for all ranks after each batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        hvd.allreduce(np.zeros(1), name="wait")


def model(widths: tuple[int, ...], *, reduces: bool) -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(width, activation="relu") for width in widths[1:]]
    net = keras.Sequential([keras.Input((widths[0],)), *layers, keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(1e-3)
    net.compile(optimizer=hvd.DistributedOptimizer(optimizer) if reduces else optimizer, loss="mse")
    return net


def alone_ms(net: Any) -> list[float]:
    """Milliseconds of reductions of the gradients without a model, on this rank."""
    values = [np.ones(variable.shape, "float32") for variable in net.trainable_variables]
    gradients = [keras.ops.convert_to_tensor(value) for value in values]
    found = []
    for _ in range(REDUCTIONS):
        start = time.perf_counter()
        net.optimizer._reduction.reduce(gradients)
        found.append(1e3 * (time.perf_counter() - start))
    return found


def step_ms(net: Any, x: np.ndarray, *callbacks: Any) -> float:
    """Of an epoch, on the slowest rank."""
    hvd.allreduce(np.zeros(1))  # ranks begin together
    start = time.perf_counter()
    net.fit(
        x, x[:, :1], batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=list(callbacks)
    )
    return float(
        hvd.allreduce(np.array([1e3 * (time.perf_counter() - start) / STEPS]), op=hvd.Max)[0]
    )


def spread(values: list[float]) -> list[float]:
    low, middle, high = statistics.quantiles(values, n=4)
    return [round(value, 2) for value in (middle, low, high)]


def main() -> None:
    hvd.init()
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=11)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = options.rounds
    for name, widths in WIDTHS.items():
        x = (
            np.random.default_rng(hvd.rank())
            .normal(size=(STEPS * BATCH, widths[0]))
            .astype("float32")
        )
        nets = {"plain": model(widths, reduces=False), "reduced": model(widths, reduces=True)}
        for net in nets.values():
            step_ms(net, x)  # compiles it
        times: dict[str, list[float]] = {kind: [] for kind in ("plain", "waiting", "reduced")}
        for _ in range(rounds):
            times["plain"].append(step_ms(nets["plain"], x))
            times["waiting"].append(step_ms(nets["plain"], x, Wait()))
            times["reduced"].append(step_ms(nets["reduced"], x))
        row = {
            "backend": keras.backend.backend(),
            "ranks": hvd.size(),
            "model": name,
            "gradient_mb": round(4e-6 * nets["plain"].count_params(), 2),
            "rounds": rounds,
            **{f"{kind}_ms": spread(found) for kind, found in times.items()},
            "alone_ms": spread(alone_ms(nets["reduced"])),
            **{
                name: spread(
                    [one / other for one, other in zip(times["reduced"], times[to], strict=True)]
                )
                for name, to in (("ratio", "plain"), ("ratio_to_waiting", "waiting"))
            },
        }
        if hvd.rank() == 0:
            print(json.dumps(row), flush=True)
            if options.json:
                append(options.json, row)


if __name__ == "__main__":
    main()
