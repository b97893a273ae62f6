"""Runs on the ranks: the jobs of a plan, one after the other on each engine; some are stopped by a signal that only one rank receives.

python tests/support/resume_matrix.py PLAN.json OUT.json      PLAN: {engine: [[run, words, stop], ...]}, OUT: {run: Outcome}, from rank 0
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from ranks import implemented, jobs_of_this_copy
from torch import nn

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config.read import configure
from hvdtrain.core.arrays import Batch
from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.source import Source
from hvdtrain.training.build import connect
from hvdtrain.training.datasets import Datasets, open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.run_lock import RunLock
from hvdtrain.training.train_job import train_job

# 31 splits neither over 2 ranks nor over 4, and 157 not into steps of 31: every share is uneven,
# and steps straddle epochs. data.ahead=0: a job reads only samples that it learns from, so a
# stopped job's rows can be counted.
DATA = (
    "data.name=synthetic data.samples=157 data.val_samples=61 data.classes=5 batch.size=31 "
    "guard.equal_steps=1 data.ahead=0"
)
# Steps end after 31, 62, 93, 124, 155, 186, 217, 279, 341, 403, 496 samples; epochs after 157, 314,
# 471. Rows of JAX keep their number.
LINEAR = (
    f"{DATA} epochs=3 data.shape=[4,4,2] model.name=linear speed.precision=fp64 batch.evaluate=31 "
    "log.every_steps=2 checkpoint.keep_last=1 "
    "optim.name=lars optim.trust=0.1 optim.base_lr=0.05 optim.weight_decay=1e-3 recipe.warmup=0.7 "
    "recipe.growth=milestones recipe.grow_at=[1.2,2.3] recipe.grow_to=[62,93]"
)
# so many steps before the signal comes; the ranks synchronize one step later
POINTS = {
    "warm-up": 1,
    "growth": 7,
    "end of an epoch": 8,
}
TORCH = f"{DATA} epochs=2 data.shape=[8,8,2] log.every_steps=3 optim.base_lr=0.05"
RESNET = f"{TORCH} model.name=wide_resnet model.widths=[2,2,4,4]"
MLP = f"{TORCH} model.name=mlp model.widths=[12,8]"
ALL = {  # kinds of state that a job may have in the torch framework; float32 except for the last
    "running statistics, dropout": f"{RESNET} model.dropout=0.2",
    "a user's model, its buffer, its dropout": f"{TORCH} model.name=resume_matrix:Dropping",
    "adam": f"{RESNET} optim.name=adam optim.base_lr=0.003",
    "novograd": f"{RESNET} optim.name=novograd optim.base_lr=0.01",
    "muon": f"{RESNET} optim.name=muon optim.base_lr=0.02 optim.ema=0.8",
    "sync norm": f"{RESNET} norm.kind=sync",
    "ghost norm": f"{RESNET} norm.kind=ghost norm.ghost=5",
    "torch.optim.RMSprop": f"{MLP} optim.name=torch.optim.RMSprop optim.base_lr=0.001 "
    "optim.momentum=0.9",
    "noise scale": f"{MLP} log.noise_scale=true",
    "partition": f"{MLP} data.sampling=partition",
    "noises, clipping": f"{MLP} optim.base_batch=24 recipe.sample_noise=0.5 "
    "recipe.gradient_noise=0.01 optim.clip_norm=1",
    "buckets, micro-batches": f"{MLP} comm.reduce=bucket comm.bucket_mb=0.001 batch.micro=5",
    "stopped in evaluation": f"{RESNET} batch.evaluate=5",
    "augmentation": implemented(
        f"{RESNET} augment.crop=2 augment.pad=reflect augment.flip=alternating "
        "augment.cutout=3 evaluate.views=6 "
        "augment.cutmix=1.0 augment.mixup=0.3 augment.erase=0.5 augment.color_jitter=[0.4]"
    ),
    "fp16": f"{MLP} speed.precision=fp16",
    "local steps": f"{MLP} comm.local_steps=3",
    "ZeRO stage 1": f"{MLP} optim.name=lamb optim.base_lr=0.003 optim.ema=0.8 shard.stage=1 "
    "comm.bucket_mb=0.001 optim.clip_norm=1",
    "ZeRO stage 2": f"{MLP} optim.name=torch.optim.Adam optim.base_lr=0.003 shard.stage=2 "
    "comm.bucket_mb=0.001 batch.micro=5",
    "post-local steps": f"{MLP} comm.local_steps=3 comm.local_from=4steps",
    "growth, fp64": f"{RESNET} epochs=3 speed.precision=fp64 recipe.growth=milestones "
    "recipe.grow_at=[1.2,2.2] recipe.grow_to=[40,70]",
}
KINDS = jobs_of_this_copy(ALL)


class Stop(NamedTuple):
    """When a signal comes: while `rank` reads samples of `split` after `step` steps."""

    split: str  # "train" or "val"
    step: int
    rank: int


class Work(NamedTuple):
    run: str
    words: str
    stop: Stop | None = None


class Outcome(NamedTuple):
    code: int
    rows: list[list[int]]  # the training samples that each rank read, in order
    start_s: float  # from the call of the job to its first sample


class RecordingSource(AroundSource):
    """A source that records which samples were read. While it reads after `step` steps, this rank
    receives a signal."""

    def __init__(self, source: Source, heartbeat: Heartbeat, signals: Signals, step: int) -> None:
        self.source = source
        self._heartbeat = heartbeat
        self._signals = signals
        self._step = step
        self.rows: list[int] = []
        self.first_s = 0.0

    reads_from_memory = False

    def read(self, indices: np.ndarray) -> Batch:
        self.first_s = self.first_s or time.perf_counter()
        self.rows += indices.tolist()
        if self._heartbeat.step == self._step:
            self._signals.received = "SIGUSR2"
        return self.source.read(indices)


class Dropping(nn.Module):
    """A user's model: its dropout draws from torch's own generator, and its buffer counts."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Flatten(),
            nn.Linear(shape[0] * shape[1] * shape[2], 12),
            nn.BatchNorm1d(12),
            nn.Dropout(0.4),
        )
        self.head = nn.Linear(12, classes)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return self.head(self.body(x).relu())


# configuring takes 60 ms of a whole job's 100 ms
configured = functools.cache(lambda words: configure(None, words.split()))


def do(work: Work, communicator: Communicator) -> Outcome:
    """One job as __main__ does it, without the watchdog. Every rank calls it."""
    config = configured(work.words)
    config = config.replace(run=work.run)
    train, val, task, _ = open_datasets(config)
    heartbeat = Heartbeat()
    signals = Signals(communicator.rank)
    stop = work.stop
    at = {stop.split: stop.step} if stop and stop.rank == communicator.rank else {}
    watched = RecordingSource(train, heartbeat, signals, at.get("train", -1))
    datasets = Datasets(watched, RecordingSource(val, heartbeat, signals, at.get("val", -1)), task)
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), RunLock(heartbeat, signals) as lock:
        code = train_job(
            config, datasets, communicator, "for the test", signals, heartbeat, lock
        ).code
    return Outcome(code, communicator.allgather_object(watched.rows), watched.first_s - began)


def read_plan(path: Path) -> dict[str, list[Work]]:
    plan: dict[str, list[Any]] = json.loads(path.read_text())
    return {
        name: [Work(run, words, stop and Stop(*stop)) for run, words, stop in works]
        for name, works in plan.items()
    }


def main(plan: Path, out: Path) -> None:
    place = placement(os.environ)
    if cache := os.environ.get(
        "JAX_COMPILATION_CACHE_DIR"
    ):  # one for each rank: none may read what another is writing
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{cache}/{place.size}-{place.rank}"
    outcomes: dict[str, Outcome] = {}
    for name, works in read_plan(plan).items():
        communicator, _ = connect(configure(None, [f"comm.engine={name}"]), place)
        for work in works:
            outcomes[work.run] = do(work, communicator)
    if place.rank == 0:
        out.write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
