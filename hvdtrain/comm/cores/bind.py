"""Binds the threads of this rank to its share of the host's cores, and reports each rank's
cores."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.cores.shares import KEPT, Bind, Share, Usable, divide
from hvdtrain.comm.cores.topology import Topology, number_ranges, read_ranges
from hvdtrain.comm.driver_files import DriverFiles
from hvdtrain.comm.launcher_variables import Placement

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_TASKS = Path("/proc/self/task")
_MOST_RANKS = 8  # ranks whose cores the header names
NO_GPU = "its GPU, or the place of it, is not known"


class Seat(NamedTuple):
    """The cores that one rank got, known to all ranks."""

    host: str
    cores: str  # "0-3,8-11"
    nodes: int  # NUMA nodes of these
    note: str
    is_bound: bool


class _Claim(NamedTuple):
    """The data that ranks exchange; cores are text, because 8,192 ranks exchange them."""

    machine: str  # the same for two containers on one host
    cores: str
    near: str
    why_not_near: str


def can_bind() -> bool:
    return hasattr(os, "sched_setaffinity")


def usable_cores() -> tuple[int, ...]:
    """Returns the cores that this process may use now."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


@contextlib.contextmanager
def bound(
    bind: Bind,
    communicator: Communicator,
    gpu_address: Callable[[], str | None],
    host: Topology | None = None,
) -> Iterator[list[Seat]]:
    """Within the context, binds this rank's threads to the cores from comm.bind; threads with a
    deliberate binding keep it. Yields the seat of each rank, empty with comm.bind=none. Entering it
    is a collective, except with none.

    gpu_address: returns the PCI address of this rank's GPU, called with comm.bind=gpu. Threads that
    start later inherit the cores; on exit, all threads get their former cores.
    """
    if bind == "none":
        yield []
        return
    host = host or Topology()
    usable = _usable(bind, gpu_address, host)
    mine = _share(communicator, usable, host)
    moved = mine.is_bound and {*mine.cores} != {*usable.cores}
    if moved:
        why = _move_threads(usable.cores, mine.cores)
        if why:
            moved = False
            mine = Share(usable.cores, f"not bound: {why}", is_bound=False)
    try:
        yield communicator.allgather_object(_seat(mine, host))
    finally:
        if moved:
            _move_threads(mine.cores, usable.cores)


def bind_alone(
    bind: Bind,
    place: Placement,
    root: Path = Path("/"),
) -> list[str]:
    """Binds this process like bound(), without communication: its launcher gave all ranks of this
    host the same cores. Returns lines for the user, on rank 0."""
    if bind == "none":
        return []
    host = Topology(root)
    cores = usable_cores()
    ranks = [Usable(cores)] * place.local_size
    if bind == "gpu":
        files = DriverFiles.under(root)
        addresses = [files.address_of(rank, os.environ) for rank in range(place.local_size)]
        ranks = [_next_to(address, cores, host) for address in addresses]
    shares = divide(ranks, host)
    mine = shares[place.local_rank]
    if mine.is_bound:
        why = _move_threads(cores, mine.cores) if can_bind() else "this system cannot bind threads"
        if why:
            return [f"rank {place.rank} on {socket.gethostname()} is not bound: {why}"]
    seats = [_seat(share, host) for share in shares]
    return lines_of_seats(bind, seats) if place.rank == 0 else []


def _next_to(address: str | None, cores: tuple[int, ...], host: Topology) -> Usable:
    """Returns the cores of a rank with comm.bind=gpu. address: of its GPU; None if unknown."""
    near = host.near(address) if address else ()
    why = NO_GPU if address is None else f"/sys does not say which cores are next to GPU {address}"
    return Usable(cores, near, "" if near else why)


def _seat(share: Share, host: Topology) -> Seat:
    return Seat(
        socket.gethostname(),
        number_ranges(share.cores),
        len(host.nodes_of(share.cores)),
        share.note,
        share.is_bound,
    )


def _usable(bind: Bind, gpu_address: Callable[[], str | None], host: Topology) -> Usable:
    cores = usable_cores()
    return _next_to(gpu_address(), cores, host) if bind == "gpu" else Usable(cores)


def _share(communicator: Communicator, usable: Usable, host: Topology) -> Share:
    """Returns this rank's share among the ranks of its machine. A collective."""
    claim = _Claim(
        _machine(), number_ranges(usable.cores), number_ranges(usable.near), usable.why_not_near
    )
    claims: list[_Claim] = communicator.allgather_object(claim)
    here = [rank for rank, other in enumerate(claims) if other.machine == claim.machine]
    shares = divide([_read(claims[rank]) for rank in here], host)
    mine = shares[here.index(communicator.rank)]
    if not can_bind():
        return Share(usable.cores, "not bound: this system cannot bind threads", is_bound=False)
    return mine


def _read(claim: _Claim) -> Usable:
    return Usable(read_ranges(claim.cores), read_ranges(claim.near), claim.why_not_near)


def _machine() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip() or socket.gethostname()
    except (OSError, ValueError):
        return socket.gethostname()


def _move_threads(former: Collection[int], cores: Collection[int]) -> str:
    """Moves the threads of this process that may use the `former` cores to others. Returns why the
    kernel rejects it; empty if it does not.

    A thread with another mask was bound deliberately, such as Horovod's with
    HOROVOD_THREAD_AFFINITY.
    """
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        return f"{error.strerror}, cores {number_ranges(cores)}"
    for thread in _threads():
        with contextlib.suppress(OSError):  # the thread has ended
            if os.sched_getaffinity(thread) == {*former}:
                os.sched_setaffinity(thread, cores)
    return ""


def _threads() -> list[int]:
    try:
        return [int(name) for name in os.listdir(_TASKS)]
    except OSError:
        return []


def lines_of_seats(bind: Bind, seats: Sequence[Seat]) -> list[str]:
    """Returns header lines: the cores of the first host's ranks, and each note with its ranks."""
    if not seats:
        return []
    host = seats[0].host
    first = [(rank, seat) for rank, seat in enumerate(seats) if seat.host == host and seat.is_bound]
    lines = []
    if first:
        named = ", ".join(
            f"rank {rank} on cores {seat.cores}" for rank, seat in first[:_MOST_RANKS]
        )
        bound_ranks = sum(seat.is_bound for seat in seats)
        more = bound_ranks - len(first[:_MOST_RANKS])
        others = f", and {more:,} more ranks" if more else ""
        lines.append(f"comm.bind={bind}: {host}: {named}{others}")
    for note, count in Counter(seat.note for seat in seats if seat.note).items():
        ranks = [rank for rank, seat in enumerate(seats) if seat.note == note]
        whose = (
            "each rank"
            if count == len(seats)
            else f"rank{'s' * (count > 1)} {number_ranges(ranks)}"
        )
        lines.append(f"comm.bind={bind}: {note if note == KEPT else f'{whose}: {note}'}")
    wide = [rank for rank, seat in enumerate(seats) if seat.is_bound and seat.nodes > 1]
    if wide and len(wide) < len(seats):
        lines.append(
            f"comm.bind={bind}: rank{'s' * (len(wide) > 1)} {number_ranges(wide)}: cores of "
            "several NUMA nodes, which the ranks do not divide evenly"
        )
    return lines
