"""The stores at which the living ranks meet after a loss."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch.distributed as dist

from hvdtrain.comm.meeting import Address, Living, Meeting

pytestmark = pytest.mark.faults
LOOPBACK = "127.0.0.1"


class FirstOfTwo:
    """What a Meeting asks of its communicator."""

    rank, size = 0, 2

    def __init__(self, other: Address) -> None:
        self._other = other

    def allgather_object(self, thing: Any) -> list[Any]:
        return [thing, self._other]


def host_a_store(answer: Connection) -> None:
    """Until the other end says something."""
    store = dist.TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    answer.send(store.port)
    answer.recv()


def test_a_rank_that_ends_before_it_is_asked_is_not_waited_for() -> None:
    """The client of torch tries for twice its time-out, which is 1000 s, where the process has ended."""
    own = dist.TCPStore(LOOPBACK, 0, None, is_master=True, wait_for_workers=False)
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=host_a_store, args=(there,))
    process.start()
    meeting = Meeting(FirstOfTwo(Address(LOOPBACK, here.recv())), own, LOOPBACK, "secret", 1000.0)  # type: ignore[arg-type]
    connect = meeting.connection(Living([1], None, 1))
    connect().set("key", 1)
    assert connect().get("key") == 1
    here.send("end")
    process.join()
    with pytest.raises(dist.DistNetworkError):
        connect()
