"""Waits for the other ranks of a set: says who is missing, and ends the wait where they do not come."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence

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
NOTICE_S = 1.0  # for the announcements of other ranks to come
_FIX = "look at what these ranks do instead (py-spy dump); or HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=... (0: wait forever)"


def wait_for(exchange: Exchange, settings: Settings, ranks: Sequence[int], rank: int, purpose: Callable[[], str]) -> None:
    """Returns once every rank is in the exchange. Raises Stalled after settings.end_s.

    ranks: of the job, those of the set; rank: this one's place among them.
    """
    start = time.perf_counter()
    announced = warned = False
    while not exchange.done():
        waited_s = time.perf_counter() - start
        if waited_s < SPIN_S:
            continue
        time.sleep(min(SLEEP_S, waited_s / SHARE))
        if waited_s > ANNOUNCE_S and not announced:
            announced = True
            exchange.announce()
        if settings.warn_s is not None and waited_s > settings.warn_s and not warned:
            warned = True
            _warn(exchange, ranks, rank, f"{purpose()}: ", waited_s)
        if settings.end_s is not None and waited_s > settings.end_s:
            what = f"{purpose()}: {ranks_text(_missing(exchange, ranks))} did not come within {settings.end_s:g} s"
            raise Stalled(what, "hvdtrain.horovod", _FIX)


def _warn(exchange: Exchange, ranks: Sequence[int], rank: int, purpose: str, waited_s: float) -> None:
    """Said by the first rank that waits."""
    missing = _missing(exchange, ranks)
    present = [other for other in ranks if other not in missing]
    if missing and present and ranks[rank] == present[0]:
        text = f"hvdtrain.horovod: {purpose}{ranks_text(present)} waited {waited_s:.0f} s for {ranks_text(missing)}"
        print(text, file=sys.stderr, flush=True)


def _missing(exchange: Exchange, ranks: Sequence[int]) -> list[int]:
    exchange.announce()
    end = time.monotonic() + NOTICE_S
    while time.monotonic() < end and not exchange.done():
        time.sleep(0.02)
    present = exchange.present()
    return [rank for place, rank in enumerate(ranks) if place not in present]


def lost_ranks(exchange: Exchange, ranks: Sequence[int], rank: int) -> list[int]:
    """After a connection broke: those of the other ranks that do not announce themselves; several where some are still at work alone."""
    others = {place for place in range(len(ranks)) if place != rank}
    absent, end = set(others), time.monotonic() + NOTICE_S
    with contextlib.suppress(Exception):  # the store of torch.distributed is gone with the rank that has it
        exchange.announce()
        while len(absent) > 1 and time.monotonic() < end:
            absent = others - exchange.present()
            time.sleep(0.02)
    return [ranks[place] for place in sorted(absent or others)]
