"""The ranks of a job without MPI meet at the store: all arrive, each once, started for the same number of ranks, with the same secret."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import NamedTuple, NoReturn

from hvdtrain.comm.placement import Placement
from hvdtrain.comm.rendezvous import SECRET, Rendezvous
from hvdtrain.comm.signed.store import SignedStore
from hvdtrain.errors import UserError

HOST_EXITS_LATER_S = 0.5


def wait_for_all_ranks(store: SignedStore, rendezvous: Rendezvous, place: Placement, timeout: timedelta) -> None:
    """Raises UserError where two processes have one rank, were started for different numbers of ranks, or do not arrive in time.

    Numbers that differ are an error as soon as two processes meet, on all that are there: the one that notices it wakes the others.
    """
    where = f"{rendezvous.host}:{rendezvous.port}"
    mine = Arrival(place.rank, place.size, place.local_size, socket.gethostname())
    _compare_sizes(store, mine, where)
    if store.add(f"rank/{place.rank}", 1) > 1:
        raise UserError(f"two processes are rank {place.rank}", where, "one launcher, one job at an address; comm.address=HOST:PORT")
    store.set(f"here/{place.rank}", mine)
    try:
        store.wait([f"here/{rank}" for rank in range(place.size)], timeout)
    except RuntimeError:  # torch.distributed.DistError
        missing = [str(rank) for rank in range(place.size) if not store.has(f"here/{rank}")]
        if missing:
            what = f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:16])} did not arrive within {timeout.total_seconds():g} s"
            raise UserError(what, where, "look for their own errors; or comm.timeout_s=...") from None
    if store.has("refused"):
        refusal = store.get("refused")
        _raise(refusal if isinstance(refusal, UserError) else not_of_this_job(where), place.rank)
    if place.rank == 0 and not all(isinstance(store.get(f"here/{rank}"), Arrival) for rank in range(place.size)):
        raise not_of_this_job(where)


class Arrival(NamedTuple):
    """What a process tells the others when it arrives."""

    rank: int
    size: int
    local_size: int
    host: str

    def describe(self) -> str:
        return f"rank {self.rank} on {self.host} was started as one of {self.size} ranks, {self.local_size} on its host"


def _compare_sizes(store: SignedStore, mine: Arrival, where: str) -> None:
    """Raises UserError where the first process that came was started for another number of ranks, or has another secret."""
    first = store.set_first("first", mine)
    if isinstance(first, Arrival) and first.size == mine.size:
        return
    refusal, size = not_of_this_job(where), mine.size
    if isinstance(first, Arrival):
        fix = "start every host with the same --num-nodes and --num-gpus, or the same numbers of the launcher"
        refusal, size = UserError(f"{mine.describe()}; {first.describe()}", where, fix), max(first.size, mine.size)
    store.set("refused", refusal)
    for rank in range(size):
        store.set(f"here/{rank}", mine)
    store.get("refused")  # set() returns before the store has the value, and this process may end at once
    _raise(refusal, mine.rank)


def _raise(refusal: UserError, rank: int) -> NoReturn:
    """Rank 0, whose process may host the store, later: the others read the refusal there."""
    time.sleep(HOST_EXITS_LATER_S if rank == 0 else 0.0)
    raise refusal


def not_of_this_job(where: str) -> UserError:
    what = "a process that is at the job's address does not have its secret"
    return UserError(what, where, f"give every host the same {SECRET}; or another port of comm.address=HOST:PORT")
