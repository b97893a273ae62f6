"""Timing for the benchmarks: blocks of steps with and without a part of the job in turn, and single
calls in loops."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.extras.bench.trainer import Trainer as BenchTrainer
from hvdtrain.training.health.signals import Signals

# part(True) is a context in which the job has the part, part(False) one without
Part = Callable[[bool], AbstractContextManager[Any]]
LOOPS = 9


class Trainer(BenchTrainer):
    """A trainer configured by key=value overrides."""

    def __init__(self, overrides: list[str], communicator: Communicator, signals: Signals) -> None:
        super().__init__(
            configure(None, [f"comm.engine={communicator.name}", *overrides]), communicator, signals
        )


def mean_loss(before: Mapping[str, Any], after: Mapping[str, Any]) -> float:
    """The mean over the samples, or tokens, between two sync points, by the sums that a trainer has
    at each (`trainer.now.sums`)."""
    per = "tokens" if "tokens" in after else "count"
    return float((after["loss"] - before["loss"]) / (after[per] - before[per]))


@contextlib.contextmanager
def changed(*settings: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets the attribute of each (object, attribute, value), and restores it at the end."""
    former = [getattr(target, name) for target, name, _ in settings]
    for target, name, value in settings:
        setattr(target, name, value)
    try:
        yield
    finally:
        for (target, name, _), value in zip(settings, former, strict=True):
            setattr(target, name, value)


def ratio(trainer: Trainer, part: Part, rounds: int, steps: int) -> dict[str, Any]:
    """Returns the seconds of a block with the part divided by the seconds of the block without it
    in the same round. The order alternates."""
    with_part: list[float] = []
    without_part: list[float] = []
    for number in range(rounds + 1):
        for on in (True, False) if number % 2 else (False, True):
            with part(on):
                seconds = trainer.block(steps)
            if number > 0:  # the first round warms up
                (with_part if on else without_part).append(seconds)
    median, quartiles = spread([a / b for a, b in zip(with_part, without_part, strict=True)], 4)
    return {
        "ratio": median,
        "ratio_quartiles": quartiles,
        "with_ms_per_step": round(1e3 * statistics.median(with_part) / steps, 3),
        "without_ms_per_step": round(1e3 * statistics.median(without_part) / steps, 3),
        "rounds": rounds,
        "steps_per_block": steps,
    }


def in_turn(
    blocks: dict[str, Callable[[int], float]], rounds: int, steps: int
) -> dict[str, list[float]]:
    """Seconds of a block of each in each round, after a round that warms up; each round begins with
    another one."""
    times: dict[str, list[float]] = {name: [] for name in blocks}
    names = list(blocks)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            seconds = blocks[name](steps)
            if number > 0:
                times[name].append(seconds)
    return times


def microseconds(call: Callable[[], Any], calls: int = 2000) -> dict[str, Any]:
    """Microseconds of one call, measured in LOOPS loops. Every rank calls it if the call is a
    collective."""
    call()
    found = []
    for _ in range(LOOPS):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
    median, quartiles = spread(found, 3)
    return {"us": median, "us_quartiles": quartiles, "loops": LOOPS, "calls_per_loop": calls}


def spread(values: list[float], digits: int) -> tuple[float, list[float]]:
    """The median, and [lower, upper] quartile."""
    low, median, high = (round(value, digits) for value in statistics.quantiles(values, n=4))
    return median, [low, high]
