"""A job that trains in blocks of steps, without evaluations, log and checkpoints: what benches time."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Log
from hvdtrain.recipe.batch_size import resolve_batch_size
from hvdtrain.train.build import build_learner, build_recipe
from hvdtrain.train.conflicts import refuse_conflicts
from hvdtrain.train.health.deadline import Deadline
from hvdtrain.train.health.heartbeat import Heartbeat
from hvdtrain.train.health.monitor import HealthMonitor
from hvdtrain.train.health.signals import Signals
from hvdtrain.train.input.prefetch import Prefetcher
from hvdtrain.train.job import Datasets, prepare
from hvdtrain.train.loop import Job, train_to_sync_point
from hvdtrain.train.progress.train_state import TrainState
from hvdtrain.train.same_state import share_state
from hvdtrain.train.telemetry.telemetry import telemetry


class Trainer:
    """Every rank has one, of the same configuration. It never ends by itself."""

    def __init__(
        self, config: Config, provenance: Provenance, communicator: Communicator, signals: Signals, parts: Datasets | None = None
    ) -> None:
        config = resolve_batch_size(config, communicator.size)
        provenance = config.provenance
        refuse_conflicts(config, communicator.name, communicator.size)
        config = config.replace(epochs=10**6, max_steps=None)
        self.data = parts or prepare(config, provenance)
        learner: Any = build_learner(config, provenance, self.data.task, communicator)
        share_state(communicator, learner, None)
        deadline = Deadline("30d", {}, time.monotonic(), time.time(), time.monotonic) if communicator.rank == 0 else None
        health = HealthMonitor(config, communicator, signals, Heartbeat(), communicator.allgather_object("host"), deadline)
        recipe, samples = build_recipe(config, provenance, len(self.data.train)), len(self.data.train)
        watched = telemetry(config, provenance, (communicator, learner), health.hosts, Log([]), Path())
        self.prefetcher = Prefetcher(config, communicator, recipe, self.data.train, learner)
        self.job = Job(config, communicator, learner, recipe, self.prefetcher, self.data.val, Log([]), health, watched)
        self.now = TrainState(Progress(samples, samples * config.epochs))

    def block(self, steps: int) -> float:
        """Seconds of so many steps, a multiple of log.every_steps; a checkpoint under way is over at the end."""
        job, until, saver = self.job, self.now.progress.step + steps, self.job.health.saver
        job.communicator.allreduce(np.zeros(1), "begin")  # all ranks begin together
        began = time.perf_counter()
        while self.now.progress.step < until:
            self.now = train_to_sync_point(job, self.now)
            self.now = dataclasses.replace(self.now, epoch=self.now.progress.epoch)  # in the place of an evaluation
            if saver:
                saver.offer(self.now, job.learner)
        if saver:
            saver.close()
        job.communicator.allreduce(np.zeros(1), "end")
        assert self.now.progress.step == until, (self.now.progress.step, until)
        return time.perf_counter() - began
