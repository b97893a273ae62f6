"""Three ranks call fit() with hvd.elastic, one is killed, two continue: KERAS_BACKEND=... python
tests/support/keras_elastic.py OUT.json

OUT: rank 0's final weight, and the weight that is expected if the remaining ranks repeat the epoch
of the loss.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain.horovod.keras as hvd

# epoch and batch in which a rank is killed
EPOCHS = 3
BATCHES = 4
KILLED = (1, 2)
RATE = 0.05


def target(batch: int, rank: int) -> float:
    return batch + 0.1 * (rank + 1)


class OneWeight(keras.layers.Layer):
    """The input times one weight."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        return x * self.weight


class Killed(keras.callbacks.Callback):
    """Kills the rank that had number 1 at the start."""

    def __init__(self, state: Any, first_rank: int) -> None:
        super().__init__()
        self._state = state
        self._rank = first_rank

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._rank == 1 and (self._state.epoch, batch) == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state: Any, first_rank: int) -> None:
    callbacks = [
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.elastic.CommitStateCallback(state, batches_per_commit=100),
        Killed(state, first_rank),
    ]
    y = np.array([[target(batch, hvd.rank())] for batch in range(BATCHES)])
    state.model.fit(
        np.ones((BATCHES, 1)),
        y,
        batch_size=1,
        epochs=EPOCHS - state.epoch,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


def alone(sizes: list[int]) -> float:
    """Returns the weight if sizes[i] ranks computed epoch i."""
    weight = 1.0
    for size in sizes:
        for batch in range(BATCHES):
            weight -= RATE * sum(2 * (weight - target(batch, rank)) for rank in range(size)) / size
    return weight


def main() -> None:
    hvd.init()
    keras.config.set_floatx("float64")
    model = keras.Sequential([keras.Input((1,)), OneWeight()])
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(RATE)), loss="mse")
    state = hvd.elastic.KerasState(model, batch=0, epoch=0)
    resets = list[int]()
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    train(state, hvd.rank())
    found = hvd.allgather(np.array([float(keras.ops.convert_to_numpy(model.weights[0]))]))
    if hvd.rank() == 0:
        row = {
            "found": found.tolist(),
            "expected": alone([3, 2, 2]),
            "resets": resets,
            "size": hvd.size(),
            "epoch": state.epoch,
        }
        Path(sys.argv[1]).write_text(json.dumps(row))


if __name__ == "__main__":
    main()
