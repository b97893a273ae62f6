"""Ports for concurrent tests: no two tests get the same port, and the system gives it to no other
program."""

from __future__ import annotations

import itertools
import os
import socket

# below the ports of Linux's outgoing connections and of hvdtrain.comm.rendezvous
PORTS = range(10_000, 20_000)
_turns = itertools.count(101 * os.getpid())


def free_port() -> int:
    """Returns a port on which nothing listens. It is reserved for this process until the process
    ends."""
    for turn in itertools.islice(_turns, len(PORTS)):
        port = PORTS[turn % len(PORTS)]
        if _reserve(port) and _is_free(port):
            return port
    raise AssertionError(f"no free port in {PORTS}")


def _reserve(port: int) -> bool:
    """By a socket with the port's name, which no other process can have meanwhile, and which the
    system closes with this process."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reservation:
        try:
            reservation.bind(f"\0hvdtrain-test-port-{port}")
        except OSError:
            return False
        reservation.detach()
    return True


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True
