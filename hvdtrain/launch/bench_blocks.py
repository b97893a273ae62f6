"""A job that trains in blocks of steps, without evaluations, log and checkpoints: what benches time."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.comm.engine import Engine
from hvdtrain.config import Config
from hvdtrain.configure import Origins
from hvdtrain.recipe.compose import for_ranks
from hvdtrain.report.log import Log
from hvdtrain.run.build import build_learner, build_recipe, check_batch
from hvdtrain.run.deadline import Deadline
from hvdtrain.run.feed import Feed
from hvdtrain.run.gauges import gauges
from hvdtrain.run.guard import Guard
from hvdtrain.run.job import Parts, prepare
from hvdtrain.run.loop import Job, train_to_meeting
from hvdtrain.run.pulse import Pulse
from hvdtrain.run.signals import Signals
from hvdtrain.run.standing import Standing
from hvdtrain.run.start import share_state
from hvdtrain.state import Progress


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
