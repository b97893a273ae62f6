"""Ranks that only pretend to train under a watchdog, and hang: each word is RANK:HOW."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import numpy as np

from hvdtrain.comm.communicator import Communicator, SingleProcessCommunicator
from hvdtrain.comm.launcher_variables import placement
from hvdtrain.config import plugins
from hvdtrain.config.sections.guard import GuardConfig
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


def stop(communicator: Communicator) -> None:
    """Stopped by the system, for ever."""
    os.kill(os.getpid(), signal.SIGSTOP)


def suspend(communicator: Communicator) -> None:
    """Stopped twice, until somebody sends SIGCONT."""
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGSTOP)


HANGS = {call.__name__: call for call in (sleep, loop, hold, alone, stop, suspend)}


def main(name: str, stall_s: float, start_s: float, *words: str) -> None:
    hangs = {int(rank): how for rank, _, how in (word.partition(":") for word in words)}
    place = placement(os.environ)
    heartbeat = Heartbeat()
    guard = GuardConfig(stall_s=stall_s or None, start_s=start_s or None)
    # before the limits count: an import takes a second
    engine = None if name == "single" else plugins.load("comm", name, "tests")
    with (
        Signals(place.rank) as signals,
        Watchdog(heartbeat, signals, guard, place.rank) as watchdog,
    ):
        heartbeat.beat("reading the data", 0, 0)
        if hangs.get(place.rank) == "never":
            say(place.rank, "never connects")
            time.sleep(1000)  # before it connects
        communicator: Communicator = (
            engine.connect(place) if engine else SingleProcessCommunicator()
        )
        heartbeat.beat("attaching the watchdog", 0, 0)
        watchdog.attach(communicator)
        if hangs.get(place.rank) == "start":
            say(place.rank, "builds endlessly")
            sleep(communicator)
        communicator.allreduce(np.ones(3), "sum")  # the first one connects the ranks
        heartbeat.training = True
        heartbeat.limit = "stall_s"
        for step in range(HANGS_AT + 1):
            heartbeat.beat("step", 3, step)
            communicator.allreduce(np.ones(3), "sum")
        say(place.rank, "trained")
        heartbeat.beat("reading samples" if place.rank in hangs else "step", 3, step + 1)
        HANGS[hangs.get(place.rank, "alone")](communicator)
        say(place.rank, f"received {signals.received or 'nothing'}")
        communicator.close()


def say(rank: int, what: str) -> None:
    print(f"rank {rank} {what} at {time.time():.3f}", flush=True)
