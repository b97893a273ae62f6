"""A job that trains in blocks of steps, and clocks: whole steps with and without a part by turns, and single calls in loops."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from hvdtrain.comm.engine import Engine
from hvdtrain.configure import configure
from hvdtrain.report.log import Log
from hvdtrain.run.build import build_learner, build_recipe
from hvdtrain.run.deadline import Deadline
from hvdtrain.run.guard import Guard
from hvdtrain.run.job import prepare
from hvdtrain.run.loop import Job, train_to_meeting
from hvdtrain.run.pulse import Pulse
from hvdtrain.run.signals import Signals
from hvdtrain.run.standing import Standing
from hvdtrain.run.start import share_state
from hvdtrain.state import Progress

Part = Callable[[bool], AbstractContextManager[Any]]  # part(True): the job has it, part(False): it has not
LOOPS = 9


class Trainer:
    """Every rank has one, of the same words."""

    def __init__(self, words: list[str], engine: Engine, signals: Signals) -> None:
        config, origins = configure(None, [f"comm.engine={engine.name}", "epochs=1000000", *words])
        self.data = prepare(config, origins)
        learner = build_learner(config, origins, self.data.task, engine)
        share_state(engine, learner, None)
        deadline = Deadline("30d", {}, time.monotonic(), time.time(), time.monotonic) if engine.rank == 0 else None
        guard = Guard(config, engine, signals, Pulse(), engine.exchange("host"), deadline)
        recipe, samples = build_recipe(config, origins, len(self.data.train)), len(self.data.train)
        self.job = Job(config, engine, learner, recipe, self.data.train, self.data.val, Log([]), guard)
        self.now = Standing(Progress(samples, samples * config.epochs))

    def block(self, steps: int) -> float:
        """Seconds of so many steps, a multiple of log.every_steps, without evaluations; a checkpoint under way is over at the end."""
        job, until = self.job, self.now.progress.step + steps
        job.engine.allreduce(np.zeros(1), "begin")  # all ranks begin together
        began = time.perf_counter()
        while self.now.progress.step < until:
            self.now = train_to_meeting(job, self.now)
            self.now = dataclasses.replace(self.now, epoch=self.now.progress.epoch)  # in the place of an evaluation
            if job.saver:
                job.saver.offer(self.now, job.learner)
        if job.saver:
            job.saver.close()
        job.engine.allreduce(np.zeros(1), "end")
        assert self.now.progress.step == until, (self.now.progress.step, until)
        return time.perf_counter() - began


@contextlib.contextmanager
def changed(*settings: tuple[Any, str, Any]) -> Iterator[None]:
    """Each (thing, attribute, value), and back."""
    former = [getattr(thing, name) for thing, name, _ in settings]
    for thing, name, value in settings:
        setattr(thing, name, value)
    try:
        yield
    finally:
        for (thing, name, _), value in zip(settings, former, strict=True):
            setattr(thing, name, value)


def ratio(trainer: Trainer, part: Part, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of a block with the part, divided by those of one without it beside it; every second round begins with the other."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(rounds + 1):
        for on in (True, False) if turn % 2 else (False, True):
            with part(on):
                times[on].append(trainer.block(steps))
    a, b = times[True][1:], times[False][1:]  # the first round warms up
    middle, quartiles = spread([x / y for x, y in zip(a, b, strict=True)], 4)
    return {
        "ratio": middle,
        "ratio_quartiles": quartiles,
        "with_ms_per_step": round(1e3 * statistics.median(a) / steps, 3),
        "without_ms_per_step": round(1e3 * statistics.median(b) / steps, 3),
        "rounds": rounds,
        "steps_per_block": steps,
    }


def microseconds(call: Callable[[], Any], calls: int = 2000) -> dict[str, Any]:
    """Of one call, in LOOPS loops. Every rank calls it, if the call is a collective."""
    call()
    found = []
    for _ in range(LOOPS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
    middle, quartiles = spread(found, 3)
    return {"us": middle, "us_quartiles": quartiles, "loops": LOOPS, "calls_per_loop": calls}


def spread(values: list[float], digits: int) -> tuple[float, list[float]]:
    """The median, and the lower and upper quartile."""
    low, middle, high = (round(value, digits) for value in statistics.quantiles(values, n=4))
    return middle, [low, high]
