"""Reductions of gradients by hand, on the ranks: {case: what all ranks found}."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Arrays, Batch, digest
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.classification import Classification
from hvdtrain.training.build import build_learner

TASK = Classification((4, 4, 2), 3, np.array([0.4, 0.5]), np.array([0.2, 0.3]))


def learner(communicator: Communicator, *words: str) -> Learner:
    config = configure(None, ["model.name=mlp", "model.widths=[40,30]", "speed.device=cpu", *words])
    return build_learner(config, TASK, communicator)


def batch(n: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    return {
        "x": rng.integers(0, 256, (n, *TASK.shape), dtype=np.uint8),
        "y": rng.integers(0, TASK.classes, n),
    }


def hyper(batch: int, step: int) -> Hyper:
    return Hyper(lr=0.05, momentum=0.9, weight_decay=0.01, batch=batch, step=step)


def weights(state: Arrays, kinds: tuple[str, ...] = ("p.",)) -> np.ndarray:
    return np.concatenate([state[name].ravel() for name in sorted(state) if name.startswith(kinds)])


def train(one: Learner, communicator: Communicator, steps: int, sizes: list[int]) -> None:
    """Trains each rank on its own samples; rank r has sizes[r] of them."""
    for step in range(steps):
        one.step(
            [one.to_device(batch(sizes[communicator.rank], 100 * communicator.rank + step))],
            hyper(sum(sizes), step),
            step,
        )


def local(communicator: Communicator) -> dict[str, Any]:
    """comm.local_steps=3: twice three steps by each rank alone on its own samples, then the mean;
    then two steps and a sync point."""
    sizes = [5 + 3 * rank for rank in range(communicator.size)]
    one = learner(communicator, "comm.local_steps=3", "log.every_steps=3", "speed.precision=fp64")
    alone = learner(SingleProcessCommunicator(), "speed.precision=fp64")
    found: dict[str, Any] = {"model": one.describe()}
    alone.load(one.state())
    for block, steps in enumerate((3, 3, 2)):
        for step in range(steps):
            samples = batch(sizes[communicator.rank], 100 * communicator.rank + 10 * block + step)
            at = 3 * block + step
            one.step([one.to_device(samples)], hyper(sum(sizes), at), at)
            alone.step([alone.to_device(samples)], hyper(sizes[communicator.rank], at), at)
            found["apart"] = communicator.allgather_object(digest(one.state()))
        one.sync_buffers(communicator)
        mean = {
            name: communicator.allreduce(array.copy(), f"mean.{name}") / communicator.size
            for name, array in alone.state().items()
        }
        alone.load(mean)
        gaps = [float(np.abs(one.state()[name] - array).max()) for name, array in mean.items()]
        found[f"gap {block}"] = max(communicator.allgather_object(max(gaps)))
        found[f"together {block}"] = len(set(communicator.allgather_object(digest(one.state()))))
    return found


def post_local(communicator: Communicator) -> dict[str, Any]:
    """comm.local_from: two steps together, as comm.reduce=bucket makes them; then three by each
    rank alone, twice, and two more."""
    sizes = [5 + 3 * rank for rank in range(communicator.size)]
    words = ("comm.reduce=bucket", "speed.precision=fp64")
    one = learner(
        communicator, "comm.local_steps=3", "comm.local_from=2steps", "log.every_steps=3", *words
    )
    synchronous, alone = (
        learner(communicator, *words),
        learner(SingleProcessCommunicator(), "speed.precision=fp64"),
    )
    found: dict[str, Any] = {"model": one.describe()}
    for step in range(2):
        samples = batch(sizes[communicator.rank], 100 * communicator.rank + step)
        one.step([one.to_device(samples)], hyper(sum(sizes), step)._replace(together=True), step)
        synchronous.step([synchronous.to_device(samples)], hyper(sum(sizes), step), step)
    found["digests"] = communicator.allgather_object(
        [digest(each.state()) for each in (one, synchronous)]
    )
    alone.load(one.state())
    found["distinct"] = []
    for step in range(2, 10):
        samples = batch(sizes[communicator.rank], 100 * communicator.rank + step)
        one.step([one.to_device(samples)], hyper(sum(sizes), step), step)
        alone.step([alone.to_device(samples)], hyper(sizes[communicator.rank], step), step)
        if step == 9:
            one.sync_buffers(communicator)
        if step in (4, 7, 9):
            state = alone.state()
            alone.load(
                {
                    name: communicator.allreduce(array, f"mean.{name}") / communicator.size
                    for name, array in state.items()
                }
            )
        found["distinct"].append(len(set(communicator.allgather_object(digest(one.state())))))
    gaps = [float(np.abs(one.state()[name] - array).max()) for name, array in alone.state().items()]
    found["gap"] = max(communicator.allgather_object(max(gaps)))
    return found


def compression(communicator: Communicator, kind: str) -> dict[str, Any]:
    """Returns a step's change compared with the same step without compression, and each rank's
    digest."""
    sizes = [6 + rank for rank in range(communicator.size)]
    moves = []
    for words in (["comm.reduce=bucket"], [f"comm.compression={kind}"]):
        one = learner(communicator, *words)
        before = weights(one.state())
        train(one, communicator, 1, sizes)
        moves.append(weights(one.state()) - before)
    gap = float(np.linalg.norm(moves[1] - moves[0]) / np.linalg.norm(moves[0]))
    return {
        "gap": gap,
        "digests": communicator.allgather_object(digest(one.state())),
        "model": one.describe(),
    }


def adasum(communicator: Communicator) -> dict[str, Any]:
    """Two ranks, one tensor at a time: a (1 - ab / 2aa) + b (1 - ab / 2bb) (Maleki et al. 2020,
    arXiv:2006.02924, eq. 5)."""
    one = learner(
        communicator, "comm.op=adasum", "optim.name=sgd", "optim.momentum=0", "speed.precision=fp64"
    )
    alone = learner(SingleProcessCommunicator(), "optim.name=sgd", "speed.precision=fp64")
    alone.load(one.state())
    sizes = [5, 9]
    step = Hyper(lr=1.0, momentum=0.0, weight_decay=0.0, batch=14)
    before = one.state()
    one.step([one.to_device(batch(sizes[communicator.rank], communicator.rank))], step, 0)
    alone.step(
        [alone.to_device(batch(sizes[communicator.rank], communicator.rank))],
        step._replace(batch=sizes[communicator.rank]),
        0,
    )
    own = {
        name: before[name] - array for name, array in alone.state().items() if name.startswith("p.")
    }
    gap = 0.0
    for name, gradient in own.items():
        a, b = communicator.allgather_object(gradient)
        ab, aa, bb = (float((u * v).sum()) for u, v in ((a, b), (a, a), (b, b)))
        expected = a * (1 - ab / (2 * aa)) + b * (1 - ab / (2 * bb))
        gap = max(
            gap,
            float(
                np.abs(before[name] - one.state()[name] - expected).max() / np.abs(expected).max()
            ),
        )
    return {"gap": gap, "model": one.describe()}


def tuned(communicator: Communicator) -> dict[str, Any]:
    large = "model.widths=[900,900]"  # 3.4 MB in tensors of 0.1 and 3.2 MB: three ways to cut them
    one = learner(communicator, large, "comm.tune=true", "comm.reduce=bucket")
    plain = learner(communicator, large, "comm.reduce=bucket")
    for each in (one, plain):
        train(each, communicator, 3, [6] * communicator.size)
    gap = float(np.abs(weights(one.state()) - weights(plain.state())).max())
    return {"models": communicator.allgather_object(one.describe()), "gap": gap}


def sums(communicator: Communicator) -> dict[str, Any]:
    """Half numbers travel and are summed, rounding like a chain of torch's own additions, or not at
    all."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.linspace(-3, 3, 1001).to(dtype) * (communicator.rank + 1)
        expected = torch.linspace(-3, 3, 1001).double() * (
            communicator.size * (communicator.size + 1) / 2
        )
        try:
            got = communicator.start_allreduce(x, f"half.{dtype}").wait()
            assert got.dtype == dtype
            found[str(dtype)] = float((got.double() - expected).abs().max())
            got = communicator.allreduce(torch.zeros(0, dtype=dtype), f"empty.{dtype}")
            assert got.shape == (0,)
        except UserError as error:
            found[str(dtype)] = str(error)
    return found


def everything(communicator: Communicator, engine: str) -> dict[str, Any]:
    found = {
        "local": local(communicator),
        "post-local": post_local(communicator),
        "fp16": compression(communicator, "fp16"),
        "sums": sums(communicator),
        "tuned": tuned(communicator),
    }
    if engine != "horovod":
        found["bf16"] = compression(communicator, "bf16")
    elif communicator.size == 2:
        found["adasum"] = adasum(communicator)
    return found
