"""Where the living ranks of torch.distributed agree who is left after a loss, without MPI: at a store of the first living rank."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.signed.store import SignedStore

POLL_S = 0.003
ATTEMPT_S = 0.5  # of the first connection to a store; that of torch goes on trying twice as long where the process has ended
AT_A_TIME = 64
PROBE_S = 5.0  # for a host to answer; one that is down does not, a process that has ended is refused at once


class Address(NamedTuple):
    """Address of the store of a rank."""

    host: str
    port: int


class Agreement(NamedTuple):
    """Which ranks are left."""

    number: int  # of this agreement at the store where it was made
    calls: dict[int, int]  # rank -> the number of its call there that this answers


class Living(NamedTuple):
    """What agree() returns, the same on all ranks that are left."""

    ranks: list[int]  # in order, by their numbers of the start
    store: Any  # of the first of them
    number: int  # no other agreement at that store has it


class Meeting:
    """Every rank hosts a store of its own from the start: it answers as long as its process lives, whatever the process does."""

    def __init__(self, communicator: Communicator, own_store: Any, host: str, secret: str, wait_s: float) -> None:
        """own_store: hosted by this process; other ranks reach it at `host`. wait_s: for a connection. A collective."""
        self.rank, self._secret, self._own = communicator.rank, secret, own_store
        self._wait = timedelta(seconds=wait_s)
        self._addresses: list[Address] = communicator.allgather_object(Address(host, own_store.port))
        self.living = list(range(communicator.size))
        self._answered: dict[int, int] = {}  # rank -> its last call at the own store that was answered
        self._agreements = 0  # made there

    def agree(self) -> Living:
        """Returns once every living rank has called it. A rank that lives but never comes is waited for."""
        for host in self._alive(self.living[: self.living.index(self.rank) + 1]):
            found = self._decide() if host == self.rank else self._follow(host)
            if found is not None:
                self.living = found.ranks
                return found
        raise AssertionError(f"rank {self.rank} is none of {self.living}")

    def connection(self, living: Living) -> Callable[[], SignedStore]:
        """What opens a new connection to the store of an agreement."""
        host, prefix = living.ranks[0], f"agreement-{living.number}"
        return lambda: SignedStore(dist.PrefixStore(prefix, self._connect(host)), self._secret)

    def _connect(self, rank: int) -> Any:
        """Raises RuntimeError where the process of this rank has ended, or does not answer in time."""
        (host, port), wait = self._addresses[rank], timedelta(seconds=ATTEMPT_S)
        while True:
            try:
                store = dist.TCPStore(host, port, None, is_master=False, timeout=wait, wait_for_workers=False)
            except RuntimeError:
                if wait >= self._wait or not self._lives(rank):
                    raise
                wait *= 2
            else:
                store.set_timeout(self._wait)
                return store

    def _alive(self, ranks: Iterable[int]) -> Iterator[int]:
        """The ranks whose processes live, in order. After the first one many are asked at a time: of a dead host each takes PROBE_S."""
        asked = list(ranks)
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            for part in (asked[:1], *(asked[start : start + AT_A_TIME] for start in range(1, len(asked), AT_A_TIME))):
                yield from [rank for rank, lives in zip(part, threads.map(self._lives, part), strict=True) if lives]

    def _lives(self, rank: int) -> bool:
        if rank == self.rank:
            return True
        try:
            socket.create_connection(self._addresses[rank], PROBE_S).close()
        except OSError:
            return False
        return True

    def _follow(self, host: int) -> Living | None:
        """What another rank decides; None where it is gone, too."""
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
        """Waits until every other rank has called, or is gone."""
        store = SignedStore(self._own, self._secret)
        while True:
            calls = {rank: store.add(f"call/{rank}", 0) for rank in self.living if rank != self.rank}
            new = {rank: call for rank, call in calls.items() if call > self._answered.get(rank, 0)}
            if next(self._alive(sorted(calls.keys() - new.keys())), None) is None:
                break
            time.sleep(POLL_S)
        self._answered |= new
        self._agreements += 1
        store.set("agreement", Agreement(self._agreements, new))
        return Living(sorted({*new, self.rank}), self._own, self._agreements)
