"""The stores at which the living ranks meet after a loss."""

from __future__ import annotations

import multiprocessing
import socket
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from hvdtrain.comm.meeting import Address, Living, Meeting

pytestmark = pytest.mark.faults
LOOPBACK = "127.0.0.1"


class OneOf:
    """What a Meeting asks of its communicator."""

    def __init__(self, rank: int, *others: Address) -> None:
        self.rank = rank
        self.size = 1 + len(others)
        self._others = others

    def allgather_object(self, thing: Any) -> list[Any]:
        return [*self._others[: self.rank], thing, *self._others[self.rank :]]


def host_a_store(answer: Connection) -> None:
    """Until the other end says something."""
    store = dist.TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    answer.send(store.port)
    answer.recv()


def test_a_rank_that_ends_before_it_is_asked_is_not_waited_for() -> None:
    """The client of torch tries for twice its time-out, which is 1000 s, where the process has
    ended."""
    own = dist.TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=host_a_store, args=(there,))
    process.start()
    meeting = Meeting(OneOf(0, Address(LOOPBACK, here.recv())), own, LOOPBACK, "secret", 1000.0)  # type: ignore[arg-type]
    connect = meeting.connection(Living([1], None, 1))
    connect().set("key", 1)
    assert connect().get("key") == 1
    here.send("end")
    process.join()
    with pytest.raises(dist.DistNetworkError):
        connect()


@pytest.mark.clock
def test_ranks_of_a_dead_host_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose packets are lost takes PROBE_S to be given up, here a second: 40 of them took 60 s
    in all, one after the other."""
    monkeypatch.setattr("hvdtrain.comm.meeting.PROBE_S", 1.0)
    own = dist.TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    with socket.socket() as dead, ExitStack() as waiting:
        dead.bind((LOOPBACK, 0))
        dead.listen(0)
        for _ in range(4):  # its queue is full then: whoever else connects gets no answer
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(dead.getsockname())
        meeting = Meeting(
            OneOf(20, *[Address(*dead.getsockname())] * 40), own, LOOPBACK, "secret", 10.0
        )  # type: ignore[arg-type]
        began_s = time.monotonic()
        assert meeting.agree().ranks == [20]
        took_s = time.monotonic() - began_s
    assert took_s < 40, "four times PROBE_S, on a machine ten times slower"
