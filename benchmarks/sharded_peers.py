"""Sharded training of others on CPUs, for benchmarks/shards.py: DeepSpeed's ZeRO, torch's FSDP2,
and FSDP2 by Lightning Fabric.

Each has torch's fused Adam, and a loop by hand over batches that were read before. Accelerate 1.15
is not among them: on CPUs it ignores its FSDP plugin and trains by DDP. hvdtrain does not install
DeepSpeed and Lightning; into a folder that PYTHONPATH then names, with what `pip install --dry-run`
lists as missing:
    .venv/bin/pip install --no-deps --no-build-isolation --target FOLDER deepspeed lightning ...
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.import_torchvision import import_torchvision
from hvdtrain.extras.bench.trainer import Trainer
from hvdtrain.extras.divided.blocks import units
from hvdtrain.frameworks.torch.inputs import DeviceBatch
from hvdtrain.tasks.task import DeviceAndDtype, part_of

OneStep = Callable[[DeviceBatch], torch.Tensor]  # returns the mean loss of this rank's samples


class Feed:
    """What a trainer of hvdtrain has to begin with: the model, the batches of this rank, and the
    loss."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        learner: Any = trainer.job.learner
        self.communicator: Communicator = trainer.job.communicator
        self.model: torch.nn.Module = copy.deepcopy(learner.model)  # without hooks
        self._part = part_of(
            trainer.job.task,
            "torch",
            trainer.job.config,
            DeviceAndDtype(torch.float32, torch.device("cpu")),
        )
        self.batches: list[DeviceBatch] = []
        progress = trainer.now.progress
        for _ in range(steps):
            hyper, (batch,) = trainer.job.prefetcher.take(progress)
            self.batches.append(batch)
            self.lr = hyper.lr
            progress = progress.advance(hyper.batch)

    def loss(self, model: Callable[[torch.Tensor], Any], batch: DeviceBatch) -> torch.Tensor:
        """Mean over this rank's samples, or over their tokens."""
        return (
            self._part.each(model(self._part.inputs(batch.arrays)), batch.arrays, True).loss.sum()
            / batch.weight
        )

    def adam(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=self.lr, fused=True)


class Peer:
    """Blocks of steps."""

    def __init__(self, feed: Feed, one_step: OneStep) -> None:
        self._communicator = feed.communicator
        self._batches = iter(feed.batches)
        self._one_step = one_step
        self.losses: list[float] = []

    def block(self, steps: int) -> float:
        """Like Timed.block() of shards.py."""
        total = torch.zeros(())
        self._communicator.allreduce(total, "begin")
        began_s = time.perf_counter()
        for batch in itertools.islice(self._batches, steps):
            total += self._one_step(batch)
        total = self._communicator.allreduce(total, "end")
        seconds = time.perf_counter() - began_s
        self.losses.append(float(total) / steps / self._communicator.size)
        return seconds


def deepspeed(feed: Feed, stage: int) -> Peer:
    """With buckets of hvdtrain's size, and without the clipping to a norm of 1 that DeepSpeed 0.19
    has by default."""
    for name, value in {
        "RANK": feed.communicator.rank,
        "WORLD_SIZE": feed.communicator.size,
        "LOCAL_RANK": feed.communicator.local_rank,
    }.items():
        os.environ.setdefault(name, str(value))
    import deepspeed as library

    library.init_distributed(dist_backend="gloo")
    zero = {
        "stage": stage,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
    }
    config = {
        "train_micro_batch_size_per_gpu": len(feed.batches[0]),
        "zero_optimization": zero,
        "gradient_clipping": 0.0,
    }
    engine, *_ = library.initialize(
        model=feed.model, optimizer=feed.adam(feed.model), config=config
    )

    def one_step(batch: DeviceBatch) -> torch.Tensor:
        loss = feed.loss(engine, batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Peer(feed, one_step)


BUCKET = 1 << 20  # numbers


def shard_units(model: torch.nn.Module) -> torch.nn.Module:
    """By FSDP2, in hvdtrain's units."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for unit in [*units(model), model]:
        fully_shard(unit, mesh=mesh)
    return model


def fsdp2(feed: Feed) -> Peer:
    model = shard_units(feed.model)
    return by_hand(feed, model, feed.adam(model), torch.Tensor.backward)


def lightning(feed: Feed) -> Peer:
    import_torchvision()
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import LightningEnvironment
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(
        lambda model, mesh: shard_units(model), process_group_backend="gloo"
    )
    fabric = Fabric(
        accelerator="cpu",
        devices=feed.communicator.size,
        strategy=strategy,
        plugins=[LightningEnvironment()],
    )
    fabric.launch()
    model: Any = fabric.setup_module(feed.model)
    return by_hand(feed, model, fabric.setup_optimizers(feed.adam(model)), fabric.backward)


def by_hand(
    feed: Feed, model: Any, optimizer: Any, backward: Callable[[torch.Tensor], Any]
) -> Peer:
    """Returns a peer with a hand-written loop, for a model that FSDP2 shards."""
    assert all(isinstance(p, DTensor) for p in model.parameters()), "replicated"

    def one_step(batch: DeviceBatch) -> torch.Tensor:
        loss = feed.loss(model, batch)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Peer(feed, one_step)


PEERS: dict[str, Callable[[Feed], Peer]] = {
    **{f"deepspeed/{stage}": functools.partial(deepspeed, stage=stage) for stage in (1, 2, 3)},
    "fsdp2": fsdp2,
    "lightning": lightning,
}
