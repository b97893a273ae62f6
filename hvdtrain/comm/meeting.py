"""The store where the ranks of torch.distributed meet: at startup to compare their settings, and
after a loss to agree on the survivors."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.comm.rendezvous import (
    LOOPBACK,
    SECRET,
    Rendezvous,
    host_to_connect,
    listen,
    listening_address,
    local_address,
    new_secret,
)
from hvdtrain.comm.signed import SignedStore
from hvdtrain.errors import UserError

POLL_S = 0.003  # after a loss
# limit for the first connection to a store; torch's limit is twice as long if the process has ended
ATTEMPT_S = 0.5
AT_A_TIME = 64
# limit for a host to answer; a host that is down never does, a port without a process refuses
# immediately
PROBE_S = 5.0
HOST_EXITS_LATER_S = 0.5
ALL = "all"  # key: rank 0 writes here that all ranks have arrived, or why not


def rendezvous_over_mpi(communicator: Communicator) -> Rendezvous:
    """Returns rank 0's address, and a port that was free there a moment ago. Every rank calls it;
    errors are raised on all of them."""
    hosts = communicator.allgather_object(socket.gethostname())
    result: Rendezvous | UserError | None = None
    if communicator.rank == 0:
        try:
            address = listening_address(hosts, hosts[0])
            with listen(Rendezvous(address, 0), address == LOOPBACK) as probe:
                result = Rendezvous(address, probe.getsockname()[1], secret=new_secret())
        except UserError as error:
            result = error
    result = communicator.broadcast_object(result)
    if isinstance(result, UserError):
        raise result
    assert result is not None
    return result


def open_store(rendezvous: Rendezvous, place: Placement, timeout: timedelta) -> Any:
    """Opens the store of this job, which rank 0 hosts unless the launcher does."""
    if place.rank == 0 and not rendezvous.hosted:
        listener = listen(rendezvous, place.local_size == place.size)
        host, port = listener.getsockname()[:2]
        store = dist.TCPStore(
            host,
            port,
            place.size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    else:
        store = connect_to_store(rendezvous, place, timeout)
    return dist.PrefixStore(rendezvous.job, store)


def connect_to_store(rendezvous: Rendezvous, place: Placement, timeout: timedelta) -> Any:
    """Opens a new connection. Raises UserError if rank 0 does not answer in time."""
    host = host_to_connect(rendezvous, place.local_size == place.size)
    try:
        return dist.TCPStore(
            host, rendezvous.port, None, is_master=False, timeout=timeout, wait_for_workers=False
        )
    except dist.DistError as error:
        what = (
            f"the rendezvous does not answer within {timeout.total_seconds():g} s: "
            f"{str(error).splitlines()[0]}"
        )
        fix = (
            "start all ranks within that time, or comm.timeout_s=...; or comm.address=HOST:PORT "
            "that every host reaches"
        )
        raise UserError(
            what, f"{host}:{rendezvous.port}, from {socket.gethostname()}", fix
        ) from None


def wait_for_all_ranks(
    store: SignedStore, rendezvous: Rendezvous, place: Placement, timeout: timedelta
) -> None:
    """Waits until all ranks have arrived. Raises UserError if two processes have the same rank,
    were started for different numbers of ranks, or do not arrive in time.

    Different numbers are reported as soon as two processes meet, on all that have arrived, because
    the process that notices wakes the others. Only rank 0 waits for each rank, and the others wait
    for rank 0. If each waited for each, 8,192 ranks would use 67 million keys.
    """
    where = f"{rendezvous.host}:{rendezvous.port}"
    mine = Arrival(place.rank, place.size, place.local_size, socket.gethostname())
    _compare_sizes(store, mine, where)
    if store.add(f"rank/{place.rank}", 1) > 1:
        raise UserError(
            f"two processes are rank {place.rank}",
            where,
            "use one launcher, and one job per address; comm.address=HOST:PORT",
        )
    store.set(f"here/{place.rank}", mine)
    if place.rank == 0:
        _gather(store, place.size, mine, where, timeout)
    else:
        _wait_for_word(store, where, timeout)
    if store.has("refused"):
        refusal = store.get("refused")
        _raise(refusal if isinstance(refusal, UserError) else not_of_this_job(where), place.rank)


def _gather(store: SignedStore, size: int, mine: Arrival, where: str, timeout: timedelta) -> None:
    """Rank 0's part: waits for all ranks, then publishes that they have arrived, or why not."""
    try:
        store.wait([f"here/{rank}" for rank in range(size)], timeout)
        refusal = (
            None
            if all(isinstance(store.get(f"here/{rank}"), Arrival) for rank in range(size))
            else not_of_this_job(where)
        )
    except RuntimeError:  # torch.distributed.DistError
        missing = [str(rank) for rank in range(size) if not store.has(f"here/{rank}")]
        refusal = _not_arrived(missing, where, timeout) if missing else None
    if refusal:
        store.set_first("refused", refusal)
    store.set(ALL, mine)


def _wait_for_word(store: SignedStore, where: str, timeout: timedelta) -> None:
    """The other ranks' part: waits for rank 0's message. Rank 0 may start later than this rank, and
    waits as long from then on."""
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
    raise UserError(
        "rank 0 did not report whether all ranks have arrived", where, "look for its own error"
    )


def _not_arrived(missing: Sequence[str], where: str, timeout: timedelta) -> UserError:
    what = (
        f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing[:16])} did not arrive within "
        f"{timeout.total_seconds():g} s"
    )
    return UserError(what, where, "look for their own errors; or comm.timeout_s=...")


class Arrival(NamedTuple):
    """The message that a process publishes when it arrives."""

    rank: int
    size: int
    local_size: int
    host: str

    def describe(self) -> str:
        return (
            f"rank {self.rank} on {self.host} was started as one of {self.size} ranks, "
            f"{self.local_size} on its host"
        )


def _compare_sizes(store: SignedStore, mine: Arrival, where: str) -> None:
    """Raises UserError if the first process to arrive was started for another number of ranks, or
    has another secret."""
    first = store.set_first("first", mine)
    if isinstance(first, Arrival) and first.size == mine.size:
        return
    refusal = not_of_this_job(where)
    size = mine.size
    if isinstance(first, Arrival):
        fix = (
            "start every host with the same --num-nodes and --num-gpus, or the same numbers of "
            "the launcher"
        )
        refusal = UserError(f"{mine.describe()}; {first.describe()}", where, fix)
        size = max(first.size, mine.size)
    if not store.has("refused"):
        store.set("refused", refusal)
        for rank in range(size):
            store.set(f"here/{rank}", mine)
        store.set(ALL, mine)
    # set() returns before the store has the value, and this process may end immediately
    store.get(ALL)
    _raise(refusal, mine.rank)


def _raise(refusal: UserError, rank: int) -> NoReturn:
    """Raises the error; on rank 0, whose process may host the store, only after the others have
    read it there."""
    time.sleep(HOST_EXITS_LATER_S if rank == 0 else 0.0)
    raise refusal


def not_of_this_job(where: str) -> UserError:
    what = "the process at the job's address does not have the job's secret"
    return UserError(
        what, where, f"give every host the same {SECRET}; or another port of comm.address=HOST:PORT"
    )


def own_store(rendezvous: Rendezvous, communicator: Communicator) -> tuple[Any, str]:
    """Returns a store that this process hosts, and the name of its host."""
    one_host = communicator.local_size == communicator.size
    host = LOOPBACK if one_host else local_address(rendezvous, one_host) or socket.gethostname()
    listener = listen(Rendezvous(host, 0), one_host)
    host, port = listener.getsockname()[:2]
    return dist.TCPStore(
        host, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    ), host


class Address(NamedTuple):
    """The address of a rank's store."""

    host: str
    port: int


class Agreement(NamedTuple):
    """The ranks that survived."""

    number: int  # number of this agreement at its store
    calls: dict[int, int]  # rank -> the number of its call that this answers


class Living(NamedTuple):
    """The result of agree(), the same on all surviving ranks."""

    ranks: list[int]  # in order, by their original numbers
    store: Any  # hosted by the first of them
    number: int  # unique among the agreements at that store


class Meeting:
    """Lets surviving ranks agree on who is left. Every rank hosts its own store from the start,
    which answers as long as its process lives."""

    def __init__(
        self, communicator: Communicator, own_store: Any, host: str, secret: str, wait_s: float
    ) -> None:
        """own_store: hosted by this process; other ranks reach it at `host`. wait_s: limit for a
        connection. A collective."""
        self.rank = communicator.rank
        self._secret = secret
        self._own = own_store
        self._wait = timedelta(seconds=wait_s)
        self._addresses: list[Address] = communicator.allgather_object(
            Address(host, own_store.port)
        )
        self.living = list(range(communicator.size))
        self._answered: dict[int, int] = {}  # rank -> its last call that this rank's store answered
        self._agreements = 0  # number of agreements at that store

    def agree(self) -> Living:
        """Waits until every living rank has called it, without a limit."""
        for host in self._alive(self.living[: self.living.index(self.rank) + 1]):
            living = self._decide() if host == self.rank else self._follow(host)
            if living is not None:
                self.living = living.ranks
                return living
        raise AssertionError(f"rank {self.rank} is none of {self.living}")

    def connection(self, living: Living) -> Callable[[], SignedStore]:
        """Returns a function that opens a new connection to the store of an agreement."""
        host = living.ranks[0]
        prefix = f"agreement-{living.number}"
        return lambda: SignedStore(dist.PrefixStore(prefix, self._connect(host)), self._secret)

    def _connect(self, rank: int) -> Any:
        """Connects to a rank's store. Raises RuntimeError if its process has ended or does not
        answer in time."""
        (host, port), wait = self._addresses[rank], timedelta(seconds=ATTEMPT_S)
        while True:
            try:
                store = dist.TCPStore(
                    host, port, None, is_master=False, timeout=wait, wait_for_workers=False
                )
            except RuntimeError:
                if wait >= self._wait or not self._lives(rank):
                    raise
                wait *= 2
            else:
                store.set_timeout(self._wait)
                return store

    def _alive(self, ranks: Iterable[int]) -> Iterator[int]:
        """Yields the ranks whose processes live, in order. After the first one, many are probed at
        a time, because each rank of a dead host takes PROBE_S."""
        asked = list(ranks)
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            for part in (
                asked[:1],
                *(asked[start : start + AT_A_TIME] for start in range(1, len(asked), AT_A_TIME)),
            ):
                yield from [
                    rank
                    for rank, lives in zip(part, threads.map(self._lives, part), strict=True)
                    if lives
                ]

    def _lives(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        try:
            socket.create_connection(self._addresses[rank], PROBE_S).close()
        except OSError:
            return False
        return True

    def _follow(self, host: int) -> Living | None:
        """Returns another rank's decision; None if that rank has died, too."""
        try:
            connected = self._connect(host)
            store = SignedStore(connected, self._secret)
            call = store.add(f"call/{self.rank}", 1)
            while True:
                made = store.get("agreement") if store.has("agreement") else None
                if isinstance(made, Agreement) and made.calls.get(self.rank) == call:
                    return Living(sorted({*made.calls, host}), connected, made.number)
                time.sleep(POLL_S)
        except RuntimeError:
            return None

    def _decide(self) -> Living:
        """Waits until every other rank has called or died, and decides which ranks are left."""
        store = SignedStore(self._own, self._secret)
        while True:
            calls = {
                rank: store.add(f"call/{rank}", 0) for rank in self.living if rank != self.rank
            }
            new = {rank: call for rank, call in calls.items() if call > self._answered.get(rank, 0)}
            if next(self._alive(sorted(calls.keys() - new.keys())), None) is None:
                break
            time.sleep(POLL_S)
        self._answered |= new
        self._agreements += 1
        store.set("agreement", Agreement(self._agreements, new))
        return Living(sorted({*new, self.rank}), self._own, self._agreements)
