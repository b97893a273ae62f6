"""Waits for the other ranks of a set: says who is missing, and ends the wait where they do not come.

Ranks agree on whether an exchange counts. One that waits for long says "here", and how its wait ends: "taken" or "given up". One that
was away for long looks for these words, and takes the result only if nobody gives up.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hvdtrain.comm.exchange import Exchange
from hvdtrain.horovod.engine.agree import ranks_text
from hvdtrain.horovod.engine.errors import Stalled
from hvdtrain.horovod.engine.settings import Settings

SPIN_S = 0.0002  # without a sleep: the others are about to come
SHARE = (
    8  # of what it has waited, it sleeps one in so many at once: a rank that looks all the time slows down its neighbour on the same core
)
SLEEP_S = 0.0005  # at most
ANNOUNCE_S = 0.5  # of waiting, until the others are told of it
WORD_S = 0.002  # between two looks for how the waits of the others end
LOOK_S = 0.1  # after that, between two looks whether another rank gives up
NOTICE_S = 1.0  # for the "here" of other ranks to come
END_S = 10.0  # for the other ranks to say how their wait ends; one that is killed never does
_FIX = "look at what these ranks do instead (py-spy dump); or HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=... (0: wait forever)"
_FIX_LATE = (
    "look at which rank came late, in the message of the one that gave up; or HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=... (0: wait forever)"
)


class Waiting(NamedTuple):
    """What a rank waits for, in an exchange."""

    exchange: Exchange
    settings: Settings
    ranks: Sequence[int]  # of the job, those of the set
    rank: int  # this one's place among them
    purpose: Callable[[], str]


def wait_for(waiting: Waiting, since: float) -> None:
    """Returns once every rank is in the exchange and takes it. Raises Stalled on all of them where one gives up, after settings.end_s.

    since: time.monotonic() where this rank started the exchange before, which the others may have been waiting from.
    """
    exchange = waiting.exchange
    wait_without_word(waiting, lambda: _raise_if_given_up(waiting))
    if time.monotonic() - since < ANNOUNCE_S:  # as in nearly every round: nobody has said a word
        return
    if waiting.rank in exchange.said()["here"]:
        exchange.say("taken")
    end = time.monotonic() + END_S
    while _raise_if_given_up(waiting) and time.monotonic() < end:
        time.sleep(WORD_S)


def wait_without_word(waiting: Waiting, look: Callable[[], object] = lambda: None) -> None:
    """Returns once every rank is in the exchange; other ranks are not told that it is taken. Raises what look() raises, and Stalled."""
    exchange, settings = waiting.exchange, waiting.settings
    start = time.perf_counter()
    looked_s, warned = 0.0, False
    while not exchange.done():
        waited_s = time.perf_counter() - start
        if waited_s < SPIN_S:
            continue
        time.sleep(min(SLEEP_S, waited_s / SHARE))
        if waited_s > looked_s + (LOOK_S if looked_s else ANNOUNCE_S):
            if not looked_s:
                exchange.say("here")
            looked_s = waited_s
            look()
        if settings.warn_s is not None and waited_s > settings.warn_s and not warned:
            warned = True
            _warn(waiting, waited_s)
        if settings.end_s is not None and waited_s > settings.end_s:
            _give_up(waiting)


def _give_up(waiting: Waiting) -> None:
    """Returns where the ranks come meanwhile."""
    missing = _missing(waiting.exchange, waiting.ranks)
    if waiting.exchange.done():
        return
    waiting.exchange.say("given up")
    what = f"{waiting.purpose()}: {ranks_text(missing)} did not come within {waiting.settings.end_s:g} s"
    raise Stalled(what, "hvdtrain.horovod", _FIX)


def _raise_if_given_up(waiting: Waiting) -> bool:
    """Whether there are ranks whose wait has not ended."""
    said = waiting.exchange.said()
    if said["given up"]:
        gone = ranks_text([waiting.ranks[place] for place in sorted(said["given up"])])
        what = f"{waiting.purpose()}: {gone} gave up waiting before all ranks came"
        raise Stalled(what, "hvdtrain.horovod", _FIX_LATE)
    return bool(said["here"] - said["taken"])


def _warn(waiting: Waiting, waited_s: float) -> None:
    """Said by the first rank that waits."""
    missing = _missing(waiting.exchange, waiting.ranks)
    present = [other for other in waiting.ranks if other not in missing]
    if missing and present and waiting.ranks[waiting.rank] == present[0]:
        text = f"hvdtrain.horovod: {waiting.purpose()}: {ranks_text(present)} waited {waited_s:.0f} s for {ranks_text(missing)}"
        print(text, file=sys.stderr, flush=True)


def _missing(exchange: Exchange, ranks: Sequence[int]) -> list[int]:
    exchange.say("here")
    end = time.monotonic() + NOTICE_S
    while time.monotonic() < end and not exchange.done():
        time.sleep(0.02)
    present = exchange.said()["here"]
    return [rank for place, rank in enumerate(ranks) if place not in present]


def lost_ranks(exchange: Exchange, ranks: Sequence[int], rank: int) -> list[int]:
    """After a connection broke: those of the other ranks that do not announce themselves; several where some are still at work alone."""
    others = {place for place in range(len(ranks)) if place != rank}
    absent, end = set(others), time.monotonic() + NOTICE_S
    with contextlib.suppress(Exception):  # the store of torch.distributed is gone with the rank that has it
        exchange.say("here")
        while len(absent) > 1 and time.monotonic() < end:
            absent = others - exchange.said()["here"]
            time.sleep(0.02)
    return [ranks[place] for place in sorted(absent or others)]
