"""The arrays that a rank of JAX has alive in the steps of a gpt, on the ranks."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from hvdtrain.comm.communicator import AroundCommunicator, Buffer, Communicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.data.source import Field
from hvdtrain.tasks.language import Language
from hvdtrain.training.build import build_learner

TASK = Language(Field("uint16", (9,), 11))
GPT = "framework=jax model.name=gpt model.layers=8 model.heads=2 model.width=32 speed.precision=fp64 batch.size=4 optim.name=adamw"


class Watched(AroundCommunicator):
    """Counts the bytes of all arrays at each collective: the most in a pass, and beside passes."""

    def __init__(self, within: Communicator) -> None:
        super().__init__(within)
        self.in_pass, self.beside, self.gathers = 0, 0, 0

    def pass_on(self, collective: str, x: Buffer, name: str, *more: Any) -> Any:
        alive = sum(array.nbytes for array in jax.live_arrays())
        if name.startswith(("weights.", "gradient.")):
            self.in_pass = max(self.in_pass, alive)
            self.gathers += name.startswith("weights.")
        else:
            self.beside = max(self.beside, alive)
        return getattr(self.within, collective)(x, name, *more)


def most(communicator: Communicator, words: str) -> dict[str, int]:
    """Bytes at most in two steps of two micro-batches, without what was alive before; of the weights; and of one block."""
    before = sum(array.nbytes for array in jax.live_arrays())
    watched: Any = Watched(communicator)
    one = build_learner(configure(None, f"{GPT} {words}".split()), TASK, watched)
    watched.in_pass = watched.beside = watched.gathers = 0
    for number in range(2):
        tokens = np.random.default_rng(number).integers(0, 11, (2, 1, 9)).astype(np.uint16)
        hyper = Hyper(lr=0.01, momentum=0.9, weight_decay=0.01, batch=4, step=number)
        one.step([one.to_device({"tokens": each}) for each in tokens], hyper, 1)
    sizes = {piece.name: piece.nbytes for piece in one.pieces() if piece.name.startswith("p.")}
    return {
        "in_pass": watched.in_pass - before,
        "beside": watched.beside - before,
        "gathers": watched.gathers,
        "weights": sum(sizes.values()),
        "block": sum(size for name, size in sizes.items() if "blocks.0." in name),
    }
