"""Process groups of torch.distributed: collectives that they lack, and Gloo's interface,
connections and threads."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, MutableMapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.comm.order import WORDS, Word
from hvdtrain.comm.rendezvous import Rendezvous, interface_of, local_address

# torch 2.13 has given both other names
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class EvenParts:
    """The rows of a tensor in equal parts, one for each rank: the tensor itself, or a padded copy
    if it does not divide evenly.

    In the copy, the parts of the last ranks have one more row, with arbitrary numbers, than from
    communicator.part_of().
    """

    def __init__(self, tensor: torch.Tensor, rank: int, size: int) -> None:
        """tensor: of rank `rank` of `size`."""
        self._tensor = tensor
        self._size = size
        self._rows = -(-len(tensor) // size)
        self._is_copy = self._rows * size != len(tensor)
        self._even = (
            tensor.new_empty((self._rows * size, *tensor.shape[1:])) if self._is_copy else tensor
        )
        self._own = self._even[rank * self._rows : (rank + 1) * self._rows]
        for theirs, even in self.blocks():
            even.copy_(theirs)

    def blocks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns views of the same rows of the tensor and of its copy; empty without a copy."""
        if not self._is_copy:
            return []
        more = len(self._tensor) % self._size
        shape = self._tensor.shape[1:]
        longer, shorter = self._tensor.tensor_split([more * self._rows])
        even = self._even.view(self._size, self._rows, *shape)
        return [
            (longer.view(more, self._rows, *shape), even[:more]),
            (
                shorter.view(self._size - more, self._rows - 1, *shape),
                even[more:, : self._rows - 1],
            ),
        ]

    def reduce(self, group: Any) -> tuple[list[Any], torch.Tensor]:
        """Starts the sum over ranks into this rank's part, including the additional row. Other
        parts have arbitrary numbers afterwards."""
        return [
            _reduce_scatter(self._own, self._even, group=group, async_op=True)
        ] if self._even.numel() else [], self._own

    def gather(self, group: Any) -> list[Any]:
        """Starts to gather each rank's part on all ranks, in the tensor or in its copy (see
        blocks())."""
        if not self._even.numel():
            return []
        return [_all_gather(as_bytes(self._even), as_bytes(self._own), group=group, async_op=True)]


def gather_rows(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """Gathers tensors of equal shape from all ranks into a new tensor, with the ranks as its first
    axis."""
    gathered = tensor.new_empty((size, *tensor.shape))
    if tensor.numel():
        _all_gather(as_bytes(gathered), as_bytes(tensor), group=group)
    return gathered


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view of the tensor as bytes, for collectives that only move data: neither library
    supports all number types."""
    return (
        tensor.view(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )


class DeviceMessages:
    """Messages from GPU to GPU, by NCCL.

    NCCL has no tags: a rank receives from another one in the order in which that one sends. What
    two ranks send to each other would be one queue on each, and they would wait for each other:
    messages to higher ranks have a process group, and those to lower ranks another one.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        backend: str,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        """ranks: numbers in the job, which all call it; rank: this one's place among them; device:
        this rank's; timeout: of a message."""
        self._rank = rank
        self._groups = [
            dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True)
            for _ in ("to lower ranks", "to higher ranks")
        ]
        # NCCL connects two ranks in their first message, where the host of one waits for the other:
        # here all begin with the same pairs
        size = len(ranks)
        for one in range(size if size > 2 else size - 1):
            other = (one + 1) % size
            for source, to in ((one, other), (other, one)):
                self._begin_with(source, to, torch.zeros(1, dtype=torch.uint8, device=device))

    def _begin_with(self, source: int, to: int, x: torch.Tensor) -> None:
        if self._rank == source:
            self.start_send(x, to).wait()
        elif self._rank == to:
            self.start_recv(x, source).wait()

    def start_send(self, x: torch.Tensor, to: int) -> Any:
        """Behind the present work of the current stream; x is contiguous."""
        group = self._groups[to > self._rank]
        return dist.isend(as_bytes(x), group=group, group_dst=to) if x.numel() else None

    def start_recv(self, x: torch.Tensor, source: int) -> Any:
        """Into x, for streams that wait for it."""
        group = self._groups[source < self._rank]
        return dist.irecv(as_bytes(x), group=group, group_src=source) if x.numel() else None


TAG_OF_EXTREMES = 2**16  # callers of start_send() have smaller ones
SMALL_BYTES = 1024
FEW_RANKS = 8  # number of ranks up to which a ring is as fast


def extremes(tensor: torch.Tensor, op: Literal["min", "max"], group: Ranks) -> None:
    """Computes the minimum or maximum of each number over ranks, in place, with log2(ranks)
    consecutive messages. Gloo's allreduce is a ring with 2 (ranks - 1).

    In round k, a rank has the extremes of 2^k ranks, itself the last, and receives the extremes of
    the 2^k ranks before them. In the last round some ranks may count twice, which does not change
    an extreme (Hensgen, Finkel, Manber 1988, "Two algorithms for barrier synchronization", section
    3).
    """
    combine = torch.maximum if op == "max" else torch.minimum
    theirs = torch.empty_like(tensor)
    distance = 1
    while distance < group.size:
        group.exchange(tensor, distance, theirs)
        combine(tensor, theirs, out=tensor)
        distance *= 2


def is_for_extremes(tensor: torch.Tensor, ranks: int) -> bool:
    """Whether extremes() is faster and gives the same result; with NaN and signed zeros, the order
    of ranks would matter."""
    return (
        ranks > FEW_RANKS
        and tensor.device.type == "cpu"
        and not tensor.is_floating_point()
        and tensor.dtype != torch.bool
        and 0 < tensor.nbytes <= SMALL_BYTES
    )


class Ranks(Protocol):
    """The methods of a group of ranks that extremes() needs."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def exchange(self, mine: torch.Tensor, distance: int, theirs: torch.Tensor) -> None:
        """Sends to the rank `distance` after this one, and receives from the one `distance` before
        it."""


class GroupRanks(NamedTuple):
    """The ranks of a process group; None: of all."""

    group: Any
    rank: int
    size: int

    def exchange(self, mine: torch.Tensor, distance: int, theirs: torch.Tensor) -> None:
        to = (self.rank + distance) % self.size
        source = (self.rank - distance) % self.size
        works = [
            dist.isend(as_bytes(mine), group=self.group, group_dst=to, tag=TAG_OF_EXTREMES),
            dist.irecv(as_bytes(theirs), group=self.group, group_src=source, tag=TAG_OF_EXTREMES),
        ]
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait()


class GroupExchange:
    """An exchange over a process group: an asynchronous all-gather, and keys of its store for
    words.

    Ranks call it in the same order relative to the group's other collectives.
    """

    threads = True

    def __init__(self, group: Any, rank: int, size: int, name: str) -> None:
        """group: None for all ranks. name: of this exchange, in the store that all share."""
        self._group = group
        self._rank = rank
        self._size = size
        self._store: Any = dist.PrefixStore(
            f"exchange-{name}", dist.distributed_c10d._get_default_store()
        )
        self._work: Any = None
        self._number = 0

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        self._number += 1
        self._work = dist.all_gather(
            list(torch.from_numpy(rows)), torch.from_numpy(block), self._group, async_op=True
        )

    def done(self) -> bool:
        assert self._work is not None, "nothing was started"
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises if it has failed
        return True

    def say(self, word: Word) -> None:
        self._store.append(str(self._number), f"{self._rank} {word}\n")

    def said(self) -> dict[Word, set[int]]:
        key = str(self._number)
        # get() waits for a key
        lines = self._store.get(key).decode().splitlines() if self._store.check([key]) else []
        return {
            word: {int(line.split()[0]) for line in lines if line.endswith(word)} for word in WORDS
        }

    def free(self) -> None:
        """Does nothing: the group belongs to a communicator."""


Address = tuple[str, int]
# torch's name for threads that run Gloo's collectives; in torch 2.9 they have no name
THREAD_NAME = "pt_gloo_runloop"


def set_gloo_interface(rendezvous: Rendezvous, place: Placement) -> None:
    """Sets GLOO_SOCKET_IFNAME, unless the user did, because Gloo's default is the address of the
    host's name, often a loopback address."""
    address = local_address(rendezvous, place.local_size == place.size)
    name = interface_of(address) if address else None
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def connect_gloo_lazily(environ: MutableMapping[str, str]) -> None:
    """Makes Gloo connect two ranks when they first communicate, in groups that are created later,
    unless the user decided otherwise. By default it connects all pairs of each group, but with NCCL
    few of them are used: with 32 ranks in two groups, each rank had 62 connections, and now has
    9."""
    environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


class GlooConnections:
    """Gloo's connections of one process group of all ranks.

    torch can only leave a group after the rank's started collectives are done, because abort() does
    nothing with Gloo (torch 2.13). But two ranks may wait for each other in different collectives,
    without noticing that a third one died.
    """

    def __init__(self) -> None:
        self._own: set[Address] = set()  # addresses on which Gloo listens in this process
        self._of_ranks: set[Address] = set()

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Wraps the creation of the group. Sockets that begin to listen meanwhile are Gloo's."""
        self._own = set()
        self._of_ranks = set()
        before = set(_listening())
        yield
        self._own = set(_listening()) - before

    def share(self, ranks: Communicator) -> None:
        """Makes the addresses of all ranks known. A collective."""
        everywhere: list[list[Address]] = ranks.allgather_object(sorted(self._own))
        self._of_ranks = {(host, port) for of_rank in everywhere for host, port in of_rank}

    def cut(self) -> None:
        """Cuts the connections for both sides: ranks that wait for this rank get an error, and so
        does this rank."""
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
        with contextlib.suppress(OSError):  # it listens, or its peer has closed
            yield _address(one.getsockname()), _address(one.getpeername()), one


def _tcp_sockets() -> Iterator[socket.socket]:
    """Yields the TCP sockets of this process; none if the system has no /proc (macOS). Each is a
    copy, because Gloo may close its own at any time."""
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
                    if (
                        one.family in (socket.AF_INET, socket.AF_INET6)
                        and one.type == socket.SOCK_STREAM
                    ):
                        yield one


def _address(name: tuple[str, int] | tuple[str, int, int, int]) -> Address:
    return name[0], name[1]


def wait_until_idle(timeout_s: float) -> None:
    """Returns when all of Gloo's threads are idle, or after `timeout_s`.

    torch ends these threads with the last reference to their process group, which a model (FSDP2's)
    or a traceback can keep. A thread that releases a tensor needs the interpreter's lock; if the
    interpreter is exiting, the whole process is aborted instead (signal 6).

    A thread is idle if it sleeps and was not scheduled between two checks; a thread that waits for
    the interpreter lock wakes every sys.getswitchinterval(). On a system without /proc (macOS) the
    function only pauses once.
    """
    ends = time.monotonic() + timeout_s
    look_s = 4 * max(sys.getswitchinterval(), 0.005)
    before = _threads()
    while before and time.monotonic() < ends:
        time.sleep(look_s)  # releases the interpreter lock, so that waiting threads get it
        now = _threads()
        if now == before and all(state == "S" for state, *_ in now.values()):
            return
        before = now
    if not Path("/proc/self/task").exists():
        time.sleep(look_s)


def _threads() -> dict[str, tuple[str, ...]]:
    """Returns for each thread of Gloo its state (S: sleeping, R: running or ready to run), and how
    often it was switched out.

    If no thread has Gloo's name, returns all threads that Python did not start, except threads that
    wait for sockets.
    """
    found = dict[str, tuple[str, ...]]()
    unnamed = dict[str, tuple[str, ...]]()
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    for task in Path("/proc/self/task").glob("*"):
        try:
            lines = dict(
                line.split(":\t", 1)
                for line in (task / "status").read_text().splitlines()
                if ":\t" in line
            )
            waits_in = (task / "wchan").read_text()  # a function of the kernel, "0" for none
        except OSError:  # the thread has ended meanwhile
            continue
        state = (
            lines["State"][0],
            lines["voluntary_ctxt_switches"],
            lines["nonvoluntary_ctxt_switches"],
        )
        if lines["Name"] == THREAD_NAME:
            found[task.name] = state
        elif task.name not in of_python and "poll" not in waits_in:
            unnamed[task.name] = state
    return found or unnamed
