"""Jobs with parameter servers on one engine, on the ranks.

Without servers: one process. Jobs with servers.bound=0 give a loss curve, one of each rule; the
others say how old gradients were, with the last rank twenty times as slow as the others. Sync
points are close: with a bound of 1 two workers take turns from the third ticket on, so that the
fast one is ahead by two in each window, on a busy machine too. faulty: one more job, whose servers
leave out the gradient of a worker.
"""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from typing import Any
from unittest import mock

import invariance
import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.events.log import Event, Log
from hvdtrain.extras.servers.turns import AllWorkers
from hvdtrain.training.build import build_learner
from hvdtrain.training.datasets import open_datasets
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.job import make_job
from hvdtrain.training.loop import train_to_sync_point
from hvdtrain.training.replicas.broadcast import broadcast_state
from hvdtrain.training.replicas.compare import check_equal
from hvdtrain.training.start import begin

MLP = "model.name=mlp model.widths=[24,7] max_steps=6 comm.bucket_mb=0.004"
CLIPPED = "optim.base_lr=0.02 optim.clip_norm=0.5 optim.clip_value=0.1 batch.micro=5"
RULES = {  # in these few steps larc's own mode would clip every ratio to 1, so that no norm counted
    rule: f"{MLP} optim.name={rule}{' optim.mode=scale' * (rule == 'larc')} {CLIPPED}"
    for rule in ("lars", "larc", "lamb", "novograd", "adam", "adamw")
}
JOBS = {
    # without clipping: that hides a gradient of another scale
    "sgd, micro-batches": f"{MLP} optim.name=sgd optim.base_lr=0.2 batch.micro=2 "
    "evaluate.every_steps=3",
    "everything": f"{invariance.GROWN} max_steps=12 recipe.gradient_noise=0.01 "
    "guard.nonfinite=skip",
    **RULES,
    "language": "task.name=language data.name=digit_tokens:windows model.name=gpt "
    "model.layers=1 model.heads=2 model.width=24 "
    "model.tied=true optim.name=sgd optim.base_lr=0.05 max_steps=4",
    "unused layer": "model.name=faulty:Faulty optim.base_lr=0.05 max_steps=6",
}
FEW = ("sgd, micro-batches", "everything", "lamb", "novograd")
BOUNDS = ("1", "2", "4", "8", "none")
SLOW = (
    "model.name=servers_on_ranks:Slow optim.name=sgd optim.base_lr=0.1 log.every_steps=8 "
    "max_steps=80 epochs=9 guard.equal_steps=1 "
    "batch.size=16"
)


class Slow(torch.nn.Module):
    """On the last rank each pass takes twenty times as long as on the others."""

    def __init__(self, shape: tuple[int, int, int], classes: int) -> None:
        super().__init__()
        is_last = os.environ.get("OMPI_COMM_WORLD_RANK") == str(
            int(os.environ.get("OMPI_COMM_WORLD_SIZE", "0")) - 1
        )
        self.seconds = 0.04 if is_last else 0.002
        self.last = torch.nn.Linear(math.prod(shape), classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            time.sleep(self.seconds)
        return self.last(x.flatten(1))


def staleness(words: str, communicator: Communicator) -> dict[str, Any]:
    """Returns the number of a job's updates by age and by worker, and the samples that it was
    trained on."""
    config = configure(None, f"{invariance.COMMON} {words}".split())
    datasets = open_datasets(config, communicator)
    learner = build_learner(config, datasets.task, communicator)
    broadcast_state(communicator, learner, None)
    ages: Counter[str] = Counter()
    workers: Counter[str] = Counter()
    count = 0.0
    now = begin(config, datasets)

    def record(event: Event) -> None:
        for worker, of_worker in event.fields.get("staleness", {}).items():
            ages.update(of_worker)
            workers[worker] += sum(of_worker.values())

    heartbeat = Heartbeat()
    log = Log([record])
    job = make_job(
        config,
        datasets,
        communicator,
        learner,
        signals=Signals(0),
        heartbeat=heartbeat,
        log=log,
        start=now,
        run=None,
    )
    while now.progress.step < config.stop.steps:
        now = train_to_sync_point(job, now)
        check_equal(communicator, learner, job.recipe.at(now.progress), job.hosts)
        count = now.trained_samples
    return {"ages": ages, "workers": workers, "count": count, "steps": now.progress.step}


def curves(communicator: Communicator, servers: int, few: bool, faulty: bool) -> dict[str, Any]:
    of_servers = f"servers.count={servers}"
    jobs = {name: words_of for name, words_of in JOBS.items() if not few or name in FEW}
    found: dict[str, Any] = {
        "jobs": {
            name: invariance.losses(f"{of_job} {of_servers}", communicator)
            for name, of_job in jobs.items()
        }
    }
    if servers:
        found["one ticket"] = staleness(
            f"{SLOW} {of_servers} servers.bound=4 log.every_steps=1 max_steps=6", communicator
        )
        found["stale"] = {
            bound: staleness(f"{SLOW} {of_servers} servers.bound={bound}", communicator)
            for bound in BOUNDS
        }
    if faulty:
        with mock.patch.object(AllWorkers, "chosen", lambda self: self._workers[:-1]):
            found["faulty"] = invariance.losses(
                f"{JOBS['sgd, micro-batches']} {of_servers} max_steps=4", communicator
            )
    return found
