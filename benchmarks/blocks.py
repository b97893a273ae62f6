"""A job that trains in blocks of steps, and clocks: whole steps with and without a part by turns, and single calls in loops."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from hvdtrain.cli.bench.trainer import Trainer as BenchTrainer
from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.read import configure
from hvdtrain.train.health.signals import Signals

Part = Callable[[bool], AbstractContextManager[Any]]  # part(True): the job has it, part(False): it has not
LOOPS = 9


class Trainer(BenchTrainer):
    """Of a configuration in words."""

    def __init__(self, words: list[str], communicator: Communicator, signals: Signals) -> None:
        super().__init__(*configure(None, [f"comm.engine={communicator.name}", *words]), communicator, signals)


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
