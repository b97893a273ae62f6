"""Compares JAX's batch norms over ranks with torch's in one process: largest differences, on the
ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays, Batch
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TASK = Classification((5, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))
CONVNET = "model.name=convnet model.widths=[4,6]"
# ranks -> samples of each in a step
SHARES = {
    2: [(8, 4), (12, 0), (1, 11)],
    3: [(5, 4, 3), (0, 12, 0)],
}


def learner(
    framework: str, *words: str, communicator: Communicator | None = None, task: Any = TASK
) -> Learner:
    model = [] if any(word.startswith("model.name=") for word in words) else CONVNET.split()
    given = [f"framework={framework}", "speed.precision=fp64", "batch.size=12", *model, *words]
    return build_learner(configure(None, given), task, communicator or SingleProcessCommunicator())


def batch(n: int, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    return {"x": rng.integers(0, 256, (n, *TASK.shape), dtype=np.uint8), "y": rng.integers(0, 3, n)}


def step(one: Learner, batches: list[Batch], number: int, size: int) -> dict[str, float]:
    hyper = Hyper(lr=0.1, momentum=0.9, weight_decay=0.01, batch=size, step=number)
    return {
        name: float(value)
        for name, value in one.step([one.to_device(each) for each in batches], hyper, 3).items()
    }


def apart(found: Arrays, expected: Arrays) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(float(np.abs(found[name] - array).max()) for name, array in expected.items())


def buffers_of(one: Learner) -> Arrays:
    """Returns this rank's buffers, without a collective."""
    return {
        piece.name: piece.read().copy() for piece in one.pieces() if piece.name.startswith("b.")
    }


def synchronized(communicator: Communicator, words: str, model: str) -> dict[str, float]:
    """Compares the steps of ranks with norm.kind=sync with torch's, which has the samples of all
    ranks in one batch."""
    alone, one = (
        learner("torch", *model.split()),
        learner("jax", "norm.kind=sync", *words.split(), *model.split(), communicator=communicator),
    )
    one.load(alone.state())
    found = {"loss": 0.0, "buffers": 0.0}
    for number, shares in enumerate(SHARES[communicator.size]):
        of_ranks = [batch(n, 100 * number + rank) for rank, n in enumerate(shares)]
        whole = {key: np.concatenate([each[key] for each in of_ranks]) for key in ("x", "y")}
        losses = communicator.allgather_object(
            step(one, [of_ranks[communicator.rank]], number, 12)["loss"]
        )
        found["loss"] = max(
            found["loss"], abs(sum(losses) - step(alone, [whole], number, 12)["loss"])
        )
        own = {name: array for name, array in alone.state().items() if name.startswith("b.")}
        found["buffers"] = max(found["buffers"], apart(buffers_of(one), own))
    one.sync_buffers(communicator)
    return found | {"state": apart(one.state(), alone.state())}


def local(communicator: Communicator) -> list[dict[str, Any]]:
    """The buffers of plain norms before and after sync_buffers()."""
    one = learner("jax", communicator=communicator)
    step(one, [batch(6, communicator.rank)], 0, 12)
    before = buffers_of(one)
    one.sync_buffers(communicator)
    return [
        {name: array.tolist() for name, array in arrays.items()}
        for arrays in (before, buffers_of(one))
    ]


class Lost(Exception):
    """What a collective raises."""


def failing(communicator: Any) -> str:
    """What a step raises whose first collective of a norm fails."""
    one = learner("jax", "norm.kind=sync", communicator=communicator)
    tried = []

    def fail(x: Any, name: str) -> Any:
        tried.append(name)
        raise Lost(name)

    communicator.start_spread = fail
    try:
        step(one, [batch(6)], 0, 12)
    except Lost as error:
        return f"{error}, after {len(tried)}"
    finally:
        del communicator.start_spread
    return "nothing"
