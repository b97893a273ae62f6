"""How many threads a rank computes with, where several ranks share the cores of a host."""

from __future__ import annotations

import os
import socket

from hvdtrain.comm.communicator import Communicator


def asked_threads() -> int | None:
    """OMP_NUM_THREADS, of which a list is of nested levels and the first one counts; None where it is no number."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def fair_threads(communicator: Communicator) -> int:
    """This rank's share of the cores that it may use. A collective."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    mine = (socket.gethostname(), tuple(cores))
    sharers = communicator.allgather_object(mine).count(mine)  # the launcher may give each rank cores of its own, or all ranks the same
    return max(1, len(cores) // sharers)
