"""The ranks of a job without MPI meet at the store: all arrive, each once, started for the same number of ranks, with the same secret."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple, NoReturn

from hvdtrain.comm.placement import Placement
from hvdtrain.comm.rendezvous import SECRET, Rendezvous
from hvdtrain.comm.signed.store import SignedStore
from hvdtrain.errors import UserError

HOST_EXITS_LATER_S = 0.5
ALL = "all"  # the key of rank 0's word that all are here, or that there is a refusal


def wait_for_all_ranks(store: SignedStore, rendezvous: Rendezvous, place: Placement, timeout: timedelta) -> None:
    """Raises UserError where two processes have one rank, were started for different numbers of ranks, or do not arrive in time.

    Numbers that differ are an error as soon as two processes meet, on all that are there: the one that notices it wakes the others.
    Rank 0 alone waits for each rank, the others for its word: if each waited for each, 8,192 ranks would name 67 million keys.
    """
    where = f"{rendezvous.host}:{rendezvous.port}"
    mine = Arrival(place.rank, place.size, place.local_size, socket.gethostname())
    _compare_sizes(store, mine, where)
    if store.add(f"rank/{place.rank}", 1) > 1:
        raise UserError(f"two processes are rank {place.rank}", where, "one launcher, one job at an address; comm.address=HOST:PORT")
    store.set(f"here/{place.rank}", mine)
    if place.rank == 0:
        _gather(store, place.size, mine, where, timeout)
    else:
        _wait_for_word(store, where, timeout)
    if store.has("refused"):
        refusal = store.get("refused")
        _raise(refusal if isinstance(refusal, UserError) else not_of_this_job(where), place.rank)


def _gather(store: SignedStore, size: int, mine: Arrival, where: str, timeout: timedelta) -> None:
    """Rank 0's part: waits for all ranks, and tells them that they are there, or why not."""
    try:
        store.wait([f"here/{rank}" for rank in range(size)], timeout)
        refusal = None if all(isinstance(store.get(f"here/{rank}"), Arrival) for rank in range(size)) else not_of_this_job(where)
    except RuntimeError:  # torch.distributed.DistError
        missing = [str(rank) for rank in range(size) if not store.has(f"here/{rank}")]
        refusal = _not_arrived(missing, where, timeout) if missing else None
    if refusal:
        store.set_first("refused", refusal)
    store.set(ALL, mine)


def _wait_for_word(store: SignedStore, where: str, timeout: timedelta) -> None:
    """The others' part. Rank 0 may have come later than this one: from then on it waits for as long."""
    for _ in range(2):
        try:
            store.wait([ALL], timeout)
        except RuntimeError:
            if not store.has("here/0"):
                raise _not_arrived(["0"], where, timeout) from None
        else:
            if not isinstance(store.get(ALL), Arrival):
                raise not_of_this_job(where)
            return
    raise UserError("rank 0 does not say whether all ranks have arrived", where, "look for its own error")


def _not_arrived(missing: Sequence[str], where: str, timeout: timedelta) -> UserError:
    what = f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:16])} did not arrive within {timeout.total_seconds():g} s"
    return UserError(what, where, "look for their own errors; or comm.timeout_s=...")


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
    if not store.has("refused"):
        store.set("refused", refusal)
        for rank in range(size):
            store.set(f"here/{rank}", mine)
        store.set(ALL, mine)
    store.get(ALL)  # set() returns before the store has the value, and this process may end at once
    _raise(refusal, mine.rank)


def _raise(refusal: UserError, rank: int) -> NoReturn:
    """Rank 0, whose process may host the store, later: the others read the refusal there."""
    time.sleep(HOST_EXITS_LATER_S if rank == 0 else 0.0)
    raise refusal


def not_of_this_job(where: str) -> UserError:
    what = "a process that is at the job's address does not have its secret"
    return UserError(what, where, f"give every host the same {SECRET}; or another port of comm.address=HOST:PORT")
