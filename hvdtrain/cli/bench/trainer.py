"""A job that trains in blocks of steps, without evaluations, log and checkpoints: what benches time."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Engine
from hvdtrain.config.read import Origins
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Progress
from hvdtrain.events.log import Log
from hvdtrain.recipe.compose import for_ranks
from hvdtrain.train.build import build_learner, build_recipe, check_batch
from hvdtrain.train.health.deadline import Deadline
from hvdtrain.train.health.heartbeat import Pulse
from hvdtrain.train.health.monitor import Guard
from hvdtrain.train.health.signals import Signals
from hvdtrain.train.input.prefetch import Feed
from hvdtrain.train.job import Parts, prepare
from hvdtrain.train.loop import Job, train_to_meeting
from hvdtrain.train.progress.train_state import Standing
from hvdtrain.train.same_state import share_state
from hvdtrain.train.telemetry.telemetry import gauges


class Trainer:
    """Every rank has one, of the same configuration. It never ends by itself."""

    def __init__(self, config: Config, origins: Origins, engine: Engine, signals: Signals, parts: Parts | None = None) -> None:
        config, origins = for_ranks(config, origins, engine.size)
        check_batch(config, origins, engine.size)
        config = dataclasses.replace(config, epochs=10**6, max_steps=None)
        self.data = parts or prepare(config, origins)
        learner: Any = build_learner(config, origins, self.data.task, engine)
        share_state(engine, learner, None)
        deadline = Deadline("30d", {}, time.monotonic(), time.time(), time.monotonic) if engine.rank == 0 else None
        guard = Guard(config, engine, signals, Pulse(), engine.exchange("host"), deadline)
        recipe, samples = build_recipe(config, origins, len(self.data.train)), len(self.data.train)
        watched = gauges(config, origins, (engine, learner), guard.hosts, Log([]), Path())
        self.feed = Feed(config, engine, recipe, self.data.train, learner)
        self.job = Job(config, engine, learner, recipe, self.feed, self.data.val, Log([]), guard, watched)
        self.now = Standing(Progress(samples, samples * config.epochs))

    def block(self, steps: int) -> float:
        """Seconds of so many steps, a multiple of log.every_steps; a checkpoint under way is over at the end."""
        job, until, saver = self.job, self.now.progress.step + steps, self.job.guard.saver
        job.engine.allreduce(np.zeros(1), "begin")  # all ranks begin together
        began = time.perf_counter()
        while self.now.progress.step < until:
            self.now = train_to_meeting(job, self.now)
            self.now = dataclasses.replace(self.now, epoch=self.now.progress.epoch)  # in the place of an evaluation
            if saver:
                saver.offer(self.now, job.learner)
        if saver:
            saver.close()
        job.engine.allreduce(np.zeros(1), "end")
        assert self.now.progress.step == until, (self.now.progress.step, until)
        return time.perf_counter() - began
