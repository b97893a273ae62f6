"""The connections of Gloo between ranks, which a rank cuts before it leaves a group where ranks are lost."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

from hvdtrain.comm.communicator import Communicator

Address = tuple[str, int]


class GlooConnections:
    """Gloo's connections of one process group of all ranks.

    torch leaves a group once the collectives that the rank has begun are over, and has no other way: abort() does nothing with Gloo (torch
    2.13). One of them may wait for a rank that waits for this one in another collective, and neither is told of a third one that is lost.
    """

    def __init__(self) -> None:
        self._own: set[Address] = set()  # where Gloo listens in this process
        self._of_ranks: set[Address] = set()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """The group is made inside of it. What begins to listen meanwhile is Gloo."""
        self._own, self._of_ranks = set(), set()
        before = set(_listening())
        yield
        self._own = set(_listening()) - before

    def share(self, ranks: Communicator) -> None:
        """Makes the addresses of all ranks known. A collective."""
        everywhere: list[list[Address]] = ranks.allgather_object(sorted(self._own))
        self._of_ranks = {(host, port) for of_rank in everywhere for host, port in of_rank}

    def cut(self) -> None:
        """Ends them for both sides: whoever waits for anything from this rank gets an error, and so does this rank itself."""
        for own, peer, connection in _connected():
            if own in self._own or peer in self._of_ranks:
                with contextlib.suppress(OSError):  # the other side was faster
                    connection.shutdown(socket.SHUT_RDWR)


def _listening() -> Iterator[Address]:
    for one in _tcp_sockets():
        if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            yield _address(one.getsockname())


def _connected() -> Iterator[tuple[Address, Address, socket.socket]]:
    for one in _tcp_sockets():
        with contextlib.suppress(OSError):  # it listens, or has no other side any more
            yield _address(one.getsockname()), _address(one.getpeername()), one


def _tcp_sockets() -> Iterator[socket.socket]:
    """TCP sockets of this process; none where the system has no /proc (macOS). Each is a copy: Gloo may close its own at any time."""
    with contextlib.suppress(FileNotFoundError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile, or no socket
                copy = os.dup(int(number))
                try:
                    one = socket.socket(fileno=copy)
                except OSError:
                    os.close(copy)
                    continue
                with one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        yield one


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return name[0], name[1]
