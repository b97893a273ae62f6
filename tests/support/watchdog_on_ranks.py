"""Ranks that only pretend to train under a watchdog, and hang: `watchdog_on_ranks.py ENGINE STALL_S START_S HANG...`, HANG is RANK:HOW."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.placement import placement
from hvdtrain.config import plugins
from hvdtrain.config.schema import GuardConfig
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.health.watchdog import Watchdog

HANGS_AT = 20


def sleep(communicator: Communicator) -> None:
    time.sleep(1000)  # the line that a report shows


def loop(communicator: Communicator) -> None:
    while True:
        pass  # a loop without an end


def hold(communicator: Communicator) -> None:
    """In C code that does not release the interpreter lock."""
    while True:  # a signal ends the sleep
        ctypes.PyDLL(None).sleep(1000)


def alone(communicator: Communicator) -> None:
    """In a collective that no other rank joins."""
    communicator.allreduce(np.ones(3), "alone")


def go_on(communicator: Communicator) -> None:
    """No hang, but a while in which a test can suspend this process."""
    for _ in range(20):
        time.sleep(0.02)


HOW: dict[str, Callable[[Communicator], None]] = {"sleep": sleep, "loop": loop, "hold": hold, "alone": alone, "go_on": go_on}


def main(name: str, stall_s: float, start_s: float, hangs: dict[int, str]) -> None:
    place, heartbeat = placement(os.environ), Heartbeat()
    guard = GuardConfig(stall_s=stall_s or None, start_s=start_s or None)
    with Signals(place.rank) as signals, Watchdog(heartbeat, signals, guard, place.rank) as watchdog:
        heartbeat.beat("reading the data", 0, 0)
        if hangs.get(place.rank) == "never":
            say(place.rank, "never connects")
            time.sleep(1000)  # before it connects
        communicator: Communicator = SingleProcessCommunicator() if name == "single" else plugins.load("comm", name, "tests").connect(place)
        heartbeat.beat("attaching the watchdog", 0, 0)
        watchdog.attach(communicator)
        if hangs.get(place.rank) == "start":
            say(place.rank, "builds endlessly")
            HOW["sleep"](communicator)
        heartbeat.training, heartbeat.limit = True, "stall_s"
        for step in range(HANGS_AT + 1):
            heartbeat.beat("step", 3, step)
            communicator.allreduce(np.ones(3), "sum")
        heartbeat.beat("reading samples" if place.rank in hangs else "step", 3, step + 1)
        say(place.rank, "trained")
        HOW[hangs.get(place.rank, "alone" if hangs else "go_on")](communicator)
        say(place.rank, f"received {signals.received or 'nothing'}")
        communicator.close()


def say(rank: int, what: str) -> None:
    print(f"rank {rank} {what} at {time.time():.3f}", flush=True)


if __name__ == "__main__":
    main(
        sys.argv[1],
        float(sys.argv[2]),
        float(sys.argv[3]),
        {int(rank): how for rank, _, how in (word.partition(":") for word in sys.argv[4:])},
    )
