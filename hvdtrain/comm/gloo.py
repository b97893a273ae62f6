"""Gloo: the interface that it takes, connections that a rank cuts where others are lost, threads that end before the interpreter does."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.placement import Placement
from hvdtrain.comm.rendezvous import Rendezvous, interface_of, local_address

Address = tuple[str, int]
THREAD_NAME = "pt_gloo_runloop"  # as torch calls the threads that carry out Gloo's collectives; torch 2.9 gives them no name


def set_gloo_interface(rendezvous: Rendezvous, place: Placement) -> None:
    """Sets GLOO_SOCKET_IFNAME, unless the user did: Gloo's default is the address of the host's own name, often a loopback one."""
    address = local_address(rendezvous, place.local_size == place.size)
    name = interface_of(address) if address else None
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


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


def wait_until_idle(timeout_s: float) -> None:
    """Returns when no thread of Gloo has anything to do, or after `timeout_s`.

    torch ends these threads with the last reference to their process group, which a model (FSDP2's) or a traceback can keep. A thread
    that lets go of a tensor needs the interpreter's lock; in an interpreter that is ending it gets none, and the whole process is
    aborted (signal 6).

    A thread is idle when it sleeps and has not been switched in between two looks: one that waits for the interpreter's lock wakes
    every sys.getswitchinterval() to ask again. Where the system has no /proc (macOS) there is one look's pause only.
    """
    ends = time.monotonic() + timeout_s
    look_s = 4 * max(sys.getswitchinterval(), 0.005)
    before = _threads()
    while before and time.monotonic() < ends:
        time.sleep(look_s)  # without the interpreter's lock, so that who waits for it gets it
        now = _threads()
        if now == before and all(state == "S" for state, *_ in now.values()):
            return
        before = now
    if not Path("/proc/self/task").exists():
        time.sleep(look_s)


def _threads() -> dict[str, tuple[str, ...]]:
    """Thread id -> its state (S: sleeping, R: running or ready to run), and how often it was switched out, of Gloo's threads.

    Where none has Gloo's name, of all that Python has not started, but for those that wait for sockets.
    """
    found, unnamed = dict[str, tuple[str, ...]](), dict[str, tuple[str, ...]]()
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    for task in Path("/proc/self/task").glob("*"):
        try:
            lines = dict(line.split(":\t", 1) for line in (task / "status").read_text().splitlines() if ":\t" in line)
            waits_in = (task / "wchan").read_text()  # a function of the kernel, "0" for none
        except OSError:  # a thread that has ended meanwhile
            continue
        state = lines["State"][0], lines["voluntary_ctxt_switches"], lines["nonvoluntary_ctxt_switches"]
        if lines["Name"] == THREAD_NAME:
            found[task.name] = state
        elif task.name not in of_python and "poll" not in waits_in:
            unnamed[task.name] = state
    return found or unnamed
