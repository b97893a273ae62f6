"""Steps with shard.offload on the ranks: their sums, the loss scale and the weights, to compare
with gradients on the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.torch.precision import NAME
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.training.build import build_learner
from hvdtrain.training.replicas.broadcast import broadcast_state

IMAGES = without_statistics((8, 8, 1), 10)
# in step BAD a sample of the last rank has infinite weight
STEPS = 4
BAD = 1
SAMPLES = 6


def by_case(communicator: Communicator, device: str, cases: list[str]) -> dict[str, Any]:
    """Returns {words: {"sums": over all ranks, by step, "scale": the loss scale after each step,
    "weights": at the end, by name}}."""
    return {
        words: _train(communicator, f"{words} speed.device={device}".split()) for words in cases
    }


def _train(communicator: Communicator, words: list[str]) -> dict[str, Any]:
    config = configure(
        None,
        [
            "model.name=mlp",
            "model.widths=[24,16]",
            "optim.clip_norm=0.5",
            "guard.nonfinite=skip",
            *words,
        ],
    )
    learner: Any = build_learner(config, IMAGES, communicator)
    broadcast_state(communicator, learner, None)
    sums = []
    scales = []
    for step in range(STEPS):
        hyper = Hyper(0.1, 0.9, 0.0, SAMPLES * communicator.size, step)
        of_rank = learner.step([learner.to_device(_batch(communicator, step))], hyper, step)
        # infinite; a matter of rounding
        names = sorted(of_rank.keys() - {"right"} - ({"loss"} if step == BAD else set()))
        total = communicator.allreduce(np.array([float(of_rank[name]) for name in names]), "sums")
        sums.append(dict(zip(names, total.tolist(), strict=True)))
        scales.append(float(learner.state().get(NAME, np.ones(()))))
    weights = {
        name: array.tolist() for name, array in learner.state().items() if name.startswith("p.")
    }
    return {"sums": sums, "scale": scales, "weights": weights}


def _batch(communicator: Communicator, step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng([step, communicator.rank])
    batch = {
        "x": rng.integers(0, 256, (SAMPLES, 8, 8, 1), dtype=np.uint8),
        "y": rng.integers(0, 10, SAMPLES),
    }
    if step == BAD:
        batch["w"] = np.where(
            np.arange(SAMPLES) == 0,
            np.inf if communicator.rank == communicator.size - 1 else 1.0,
            1.0,
        )
    return batch
