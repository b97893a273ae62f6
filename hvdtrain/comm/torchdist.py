"""The torchdist engine: torch.distributed, with NCCL for tensors on GPUs, and Gloo for tensors in
host memory and for numpy arrays."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn
from weakref import WeakSet

import numpy as np
import torch
import torch.distributed as dist

from hvdtrain.comm import mpi
from hvdtrain.comm.communicator import (
    Buffer,
    Communicator,
    Handle,
    Op,
    StartedCollectives,
    check_buffer,
    part_of,
    writable,
)
from hvdtrain.comm.engines import Feature
from hvdtrain.comm.launcher_variables import Placement
from hvdtrain.comm.meeting import (
    Meeting,
    connect_to_store,
    not_of_this_job,
    open_store,
    own_store,
    rendezvous_over_mpi,
    wait_for_all_ranks,
)
from hvdtrain.comm.mesh import split_groups
from hvdtrain.comm.rendezvous import Rendezvous, find_rendezvous, secret_of
from hvdtrain.comm.side_channel import StoreSideChannel
from hvdtrain.comm.signed import Forged, SignedStore, pack, unpack
from hvdtrain.comm.torch_groups import (
    DeviceMessages,
    EvenParts,
    GlooConnections,
    GroupExchange,
    GroupRanks,
    as_bytes,
    connect_gloo_lazily,
    extremes,
    gather_rows,
    is_for_extremes,
    set_gloo_interface,
    wait_until_idle,
)
from hvdtrain.config.sections.comm import CommConfig
from hvdtrain.core.process import exit_now, flush_output
from hvdtrain.errors import LOST, UserError, exit_code_of

FEATURES: set[Feature] = {
    "several_ranks",
    "device_memory",
    "asynchronous",
    "bfloat16_sums",
    "ddp",
    "p2p",
    "shrink",
}
BACKENDS = "cpu:gloo,cuda:nccl"  # backends of torch.distributed with NCCL
BACKENDS_OF_INTEL = "cpu:gloo,xpu:xccl"  # with oneCCL
CLOSE_S = 10.0  # time for all ranks to close
CONNECT_S = 10.0  # time for an answer from a store after a loss
# time for the survivors to form a group after a loss, doubled each time, because another rank may
# die meanwhile
FORM_S = 1.0


def has_nccl() -> bool:
    """Whether this torch can use a GPU and has NCCL, or oneCCL for a GPU of Intel."""
    return has_oneccl() or (torch.cuda.is_available() and dist.is_nccl_available())


def has_oneccl() -> bool:
    """Whether this torch can use a GPU of Intel and has oneCCL."""
    return torch.xpu.is_available() and dist.distributed_c10d.is_xccl_available()


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Connects the ranks at comm.address, at the address from the launcher's variables, or at one
    that rank 0 sends over MPI.

    Raises UserError if this torch has no torch.distributed, or if the ranks do not connect within
    comm.timeout_s.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise UserError(
            "this torch was built without torch.distributed",
            "comm.engine=torchdist",
            "comm.engine=mpi, or another torch",
        )
    comm = comm or CommConfig()
    timeout = timedelta(seconds=comm.timeout_s)
    if place.size == 1:
        _start_process_group(dist.HashStore(), place, timeout)
        return TorchDistCommunicator(place, None, None, timeout=timeout)
    found = find_rendezvous(place, os.environ, comm.address)
    mpi_communicator = None
    if found is None:
        mpi_communicator = mpi.connect(place)
        rendezvous = rendezvous_over_mpi(mpi_communicator)
    else:
        rendezvous = found._replace(secret=secret_of(os.environ))
    store = open_store(rendezvous, place, timeout)
    wait_for_all_ranks(SignedStore(store, rendezvous.secret), rendezvous, place, timeout)
    set_gloo_interface(rendezvous, place)
    gloo = _start_process_group(dist.PrefixStore("group", store), place, timeout)
    if mpi_communicator is not None:
        return TorchDistCommunicator(
            place, mpi_communicator, None, rendezvous.secret, timeout, rendezvous, gloo
        )

    def connection() -> SignedStore:
        return SignedStore(
            dist.PrefixStore(rendezvous.job, connect_to_store(rendezvous, place, timeout)),
            rendezvous.secret,
        )

    side_channel = StoreSideChannel(connection, place.rank, place.size)
    return TorchDistCommunicator(
        place, None, side_channel, rendezvous.secret, timeout, rendezvous, gloo
    )


def _start_process_group(store: Any, place: Placement, timeout: timedelta) -> GlooConnections:
    """Creates the default process group of torch.distributed. Raises UserError if
    GLOO_SOCKET_IFNAME does not name an interface."""
    backends = BACKENDS_OF_INTEL if has_oneccl() else BACKENDS
    backend = backends if has_nccl() else "gloo"
    if has_nccl():
        connect_gloo_lazily(os.environ)
    gloo = GlooConnections()
    try:
        with gloo.recorded():
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout
            )
        return gloo
    except RuntimeError as error:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        if "Unable to find address" not in str(error) or name is None:
            raise
        where = f"GLOO_SOCKET_IFNAME={name}, rank {place.rank} on {socket.gethostname()}"
        fix = "unset it, or an interface that this host has (ip -br address)"
        raise UserError("there is no such network interface", where, fix) from None


def _leave_process_group(gloo: GlooConnections) -> None:
    """Destroys the default process group, if there is one. Closes its connections even if an
    interrupted step left collectives pending."""
    gloo.cut()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.distributed_c10d._world.group_count = (
        0  # number in the next group's name, the same on all ranks; failed attempts count, too
    )


FOREVER = timedelta(days=365)


class _LostMeanwhile(Exception):
    """Another rank died while the survivors formed a group."""


class TorchDistCommunicator(StartedCollectives):
    """The communicator of the torchdist engine. Works in place on the memory of x if it can. int16,
    which neither library supports, is summed as int32 and cast back."""

    name = "torchdist"

    def __init__(
        self,
        place: Placement,
        mpi_communicator: mpi.MpiCommunicator | None,
        store: StoreSideChannel | None,
        secret: str = "",
        timeout: timedelta = FOREVER,
        rendezvous: Rendezvous | None = None,
        gloo: GlooConnections | None = None,
    ) -> None:
        """secret: the job's, signs objects. The side channel uses MPI if MPI started the ranks,
        else the store; a single rank has neither.

        timeout: of a collective. rendezvous, gloo: only for the communicator of all ranks, not for
        a group.
        """
        self._timeout = timeout
        self._rendezvous = rendezvous
        self._gloo = gloo or GlooConnections()
        self._meeting: Meeting | None = None
        self._pending: WeakSet[Pending] | None = (
            None  # pending collectives, which hold the connections; None unless loss is survived
        )
        self._lost: list[int] = []  # dead ranks that shrink() has not returned yet
        self._form_s = FORM_S
        self.rank = place.rank
        self.size = place.size
        nccl: set[Feature] = {"nccl"} if has_nccl() else set()
        self.features = frozenset(FEATURES | nccl)
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self._mpi = mpi_communicator
        self._store = store
        self.secret = secret
        self._group: Any = None  # torch.distributed's default group
        # devices on which parts of all ranks are reduced and gathered in one call
        self.in_one_call = ("cuda", "xpu") if "cuda:nccl" in BACKENDS else ()
        self._ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        if op in ("min", "max"):
            x, tensor = self._checked(x, "allreduce", name)
            if is_for_extremes(tensor, self.size):
                extremes(tensor, op, GroupRanks(self._group, self.rank, self.size))
                return x
        return super().allreduce(x, name, op)

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        x, tensor = self._checked(x, "allreduce", name)
        operand = _reducible(tensor)
        return self._pend(
            [dist.all_reduce(operand, self._ops[op], self._group, async_op=True)],
            x,
            tensor,
            operand,
        )

    def start_broadcast(self, x: Buffer, name: str, root: int = 0) -> Handle:
        x, tensor = self._checked(x, "broadcast", name)
        return self._pend(
            [dist.broadcast(as_bytes(tensor), group=self._group, group_src=root, async_op=True)],
            x,
            tensor,
            tensor,
        )

    def start_reduce(self, x: Buffer, name: str, root: int = 0) -> Handle:
        x, tensor = self._checked(x, "allreduce", name)
        operand = _reducible(tensor)
        works = (
            [dist.reduce(operand, group=self._group, group_dst=root, async_op=True)]
            if tensor.numel()
            else []
        )
        return self._pend(works, x, tensor, operand)

    def start_reduce_scatter(self, x: Buffer, name: str) -> Handle:
        """Uses one call with NCCL. With Gloo, it reduces to each rank in turn, which takes a third
        of the time of Gloo's reduce-scatter."""
        x, tensor = self._checked(x, "start_reduce_scatter", name)
        operand = _reducible(tensor)
        own = part_of(len(tensor), self.rank, self.size)
        if tensor.device.type in self.in_one_call:
            works, part = EvenParts(operand, self.rank, self.size).reduce(self._group)
            return self._pend(works, x[own], tensor[own], part[: own.stop - own.start])
        works = [
            dist.reduce(part, group=self._group, group_dst=owner, async_op=True)
            for owner, part in self._parts(operand)
        ]
        return self._pend(works, x[own], tensor[own], operand[own])

    def start_spread(self, x: Buffer, name: str) -> Handle:
        """Uses one call with NCCL; with Gloo, a broadcast from each rank."""
        x, tensor = self._checked(x, "allgather", name)
        if tensor.device.type in self.in_one_call:
            even = EvenParts(tensor, self.rank, self.size)
            return self._pend_blocks(even.gather(self._group), x, even.blocks())
        works = [
            dist.broadcast(as_bytes(part), group=self._group, group_src=owner, async_op=True)
            for owner, part in self._parts(tensor)
        ]
        return self._pend_blocks(works, x, [])

    def _parts(self, tensor: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        """Yields the part of each rank that has one."""
        parts = [(rank, tensor[part_of(len(tensor), rank, self.size)]) for rank in range(self.size)]
        return [(rank, part) for rank, part in parts if len(part)]

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        """With Gloo, uses an allreduce and keeps this rank's part, which takes half the time."""
        x, tensor = self._checked(x, "reduce_scatter", name)
        if tensor.device.type in self.in_one_call:
            return self.start_reduce_scatter(tensor.clone(), name).wait().clone()
        summed = _reducible(tensor).clone()
        dist.all_reduce(summed, group=self._group)
        return _like(x, summed.tensor_split(self.size)[self.rank].to(tensor.dtype).clone())

    def allgather(self, x: Buffer, name: str) -> Buffer:
        """Pads every part to the rows of the longest one."""
        x, tensor = self._checked(x, "allgather", name)
        lengths = gather_rows(
            torch.tensor(len(tensor), device=tensor.device), self.size, self._group
        ).tolist()
        padded = tensor
        if len(tensor) < max(lengths):
            padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
            padded[: len(tensor)] = tensor
        parts = gather_rows(padded, self.size, self._group)
        if min(lengths) == max(lengths):
            return _like(x, parts.flatten(0, 1))
        return _like(
            x, torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)])
        )

    def allgather_object(self, thing: Any) -> list[Any]:
        """Returns objects of all ranks, sent as signed JSON. Raises TypeError for an object that
        comm/signed.py does not support."""
        packed = pack(thing, self.secret, str(self.rank))
        content = np.frombuffer(len(packed).to_bytes(8, "little") + packed, np.uint8)
        gathered = self.allgather(content, "objects").tobytes()
        start = 0
        things = []
        for rank in range(self.size):
            end = start + 8 + int.from_bytes(gathered[start : start + 8], "little")
            try:
                things.append(unpack(gathered[start + 8 : end], self.secret, str(rank)))
            except Forged:
                raise not_of_this_job(f"a message of rank {rank}") from None
            start = end
        return things

    def broadcast_object(self, thing: Any, root: int = 0) -> Any:
        """Returns the object of `root`, sent as signed JSON: see allgather_object()."""
        packed = pack(thing, self.secret, str(root)) if self.rank == root else b""
        length = self.broadcast(np.array([len(packed)]), "object.length", root)
        content = (
            np.frombuffer(packed, np.uint8).copy()
            if self.rank == root
            else np.empty(int(length[0]), np.uint8)
        )
        try:
            return unpack(self.broadcast(content, "object", root).tobytes(), self.secret, str(root))
        except Forged:
            raise not_of_this_job(f"a message of rank {root}") from None

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        x, tensor = self._on_host(x, "send", name)
        works = (
            [dist.isend(as_bytes(tensor), group=self._group, group_dst=to, tag=tag)]
            if tensor.numel()
            else []
        )
        return self._pend(works, x, tensor, tensor)

    def start_recv(self, x: Buffer, source: int, name: str, tag: int = 0) -> Handle:
        x, tensor = self._on_host(x, "recv", name)
        works = (
            [dist.irecv(as_bytes(tensor), group=self._group, group_src=source, tag=tag)]
            if tensor.numel()
            else []
        )
        return self._pend(works, x, tensor, tensor)

    def recv_from_any(self, x: Buffer, name: str, tag: int) -> int:
        x, tensor = self._on_host(x, "recv", name)
        sender = dist.recv(as_bytes(tensor), group=self._group, tag=tag)
        return sender if self._group is None else dist.get_group_rank(self._group, sender)

    def device_messages(self, device: torch.device) -> DeviceMessages:
        """Returns messages between the GPUs of these ranks; needs the feature "nccl". A
        collective."""
        ranks = list(range(self.size))
        if self._group is not None:
            ranks = dist.get_process_group_ranks(self._group)
        backend = "xccl" if has_oneccl() else "nccl"
        return DeviceMessages(ranks, self.rank, backend, device, self._timeout)

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        if self._mpi is not None:
            return self._mpi.side_channel_gather(message, wait_s)
        if self._store is not None:
            return self._store.gather(message, wait_s)
        return [message] if self._group is None else None

    def exchange(self) -> GroupExchange:
        """Returns an exchange between these ranks, in order with their other collectives."""
        return GroupExchange(
            self._group,
            self.rank,
            self.size,
            "all" if self._group is None else self._group.group_name,
        )

    def split(self, color: int | None) -> Communicator | None:
        assert self._group is None, "only the communicator of all ranks can be split"
        groups = split_groups(self, color)
        own = None
        for members in (
            groups.members
        ):  # every rank creates all of them, so that torch gives them the same names everywhere
            group = dist.new_group(members, self._timeout)
            if self.rank in members:
                place = groups.place(self.rank)
                own = TorchDistCommunicator(place, None, None, self.secret, self._timeout)
                own._group = group
        return own

    def free_group(self, group: TorchDistCommunicator) -> None:
        """Frees a group of split() that has no pending collective. Collective over its ranks."""
        dist.destroy_process_group(group._group)

    def be_ready_to_shrink(self, gpu: bool) -> None:
        by_nccl = [
            rank for rank, is_so in enumerate(self.allgather_object(gpu and has_nccl())) if is_so
        ]
        if by_nccl:
            what = (
                f"NCCL's collectives hang when a rank dies, and rank {by_nccl[0]} reduces with NCCL"
            )
            raise UserError(what, "comm.engine=torchdist", "speed.device=cpu, or guard.lost=stop")
        if self._mpi is not None:
            self._mpi.be_ready_to_shrink(gpu)
            self._pending = WeakSet()
        elif self._rendezvous is not None:
            if "TORCHELASTIC_RUN_ID" in os.environ:
                what = "torchrun ends all ranks when one dies"
                raise UserError(
                    what,
                    "comm.engine=torchdist",
                    "a launcher that leaves the others alone (docs/elastic.md); or guard.lost=stop",
                )
            store, host = own_store(self._rendezvous, self)
            self._meeting = Meeting(self, store, host, self.secret, CONNECT_S)
            assert self._store is not None
            self._store.outlives_host = True
            self._pending = WeakSet()
        self._gloo.share(self)

    def is_loss(self, error: BaseException) -> bool:
        is_of_group = isinstance(error, RuntimeError) and exit_code_of(error) == LOST
        return (
            is_of_group
            or isinstance(error, _LostMeanwhile)
            or (self._mpi is not None and self._mpi.is_loss(error))
        )

    def confirm(self) -> None:
        """Does nothing: a collective in which a rank dies fails on the ranks that need its numbers,
        and they make the others leave it."""

    def shrink(self) -> list[int]:
        for pending in self._pending or ():
            pending.drop()
        # the others, which may wait for this rank, see a closed connection
        _leave_process_group(self._gloo)
        self._shrink_by_mpi() if self._mpi is not None else self._shrink_by_meeting()
        dist.distributed_c10d._set_pg_timeout(self._timeout, dist.group.WORLD)
        self._gloo.share(self)
        place = split_groups(self, 0).place(self.rank)
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        lost = self._lost
        self._lost = []
        return lost

    def _shrink_by_mpi(self) -> None:
        assert self._mpi is not None
        self._lost += self._mpi.shrink()
        self.rank = self._mpi.rank
        self.size = self._mpi.size
        place = Placement(
            self.rank, self.size, self._mpi.local_rank, self._mpi.local_size, "shrink"
        )
        rendezvous = rendezvous_over_mpi(self._mpi)
        self._form(lambda wait: open_store(rendezvous, place, wait), place)
        self.secret = rendezvous.secret

    def _shrink_by_meeting(self) -> None:
        assert self._meeting is not None and self._store is not None
        former = self._meeting.living
        living = self._meeting.agree()
        self._lost += [rank for rank in former if rank not in living.ranks]
        self.rank = living.ranks.index(self._meeting.rank)
        self.size = len(living.ranks)
        store = dist.PrefixStore(f"agreement-{living.number}", living.store)
        self._form(lambda _: store, Placement(self.rank, self.size, 0, 1, "shrink"))
        self._store.retire()
        self._store = StoreSideChannel(self._meeting.connection(living), self.rank, self.size)
        self._store.outlives_host = True

    def _form(self, open_store: Callable[[timedelta], Any], place: Placement) -> None:
        """Forms the group of the surviving ranks. Raises _LostMeanwhile if one of them does not
        arrive in time; all then meet again."""
        wait = timedelta(seconds=self._form_s)
        self._form_s *= 2
        try:
            self._gloo = _start_process_group(
                dist.PrefixStore("group", open_store(wait)), place, wait
            )
        except (RuntimeError, UserError) as error:
            raise _LostMeanwhile from error
        self._form_s = FORM_S

    def abort(self, code: int) -> NoReturn:
        flush_output()
        if self._mpi is not None:
            self._mpi.abort(code)
        if self._store is not None:
            self._store.abort(code)
        exit_now(code)

    def close(self) -> None:
        if self._store is not None:
            self._store.close(CLOSE_S)
        dist.destroy_process_group()
        wait_until_idle(CLOSE_S)

    def _pend(
        self, works: Sequence[Any], x: Buffer, tensor: torch.Tensor, operand: torch.Tensor
    ) -> Pending:
        """tensor: a view of x, which receives the result; operand: what the works modify, the same
        tensor or a copy of another type."""
        is_copy = operand.data_ptr() != tensor.data_ptr()
        return self._pend_blocks(works, x, [(tensor, operand)] if is_copy else [])

    def _pend_blocks(
        self, works: Sequence[Any], x: Buffer, blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> Pending:
        pending = Pending(works, x, blocks)
        if self._pending is not None:
            self._pending.add(pending)
        return pending

    def _on_host(self, x: Buffer, collective: str, name: str) -> tuple[Buffer, torch.Tensor]:
        """Requires host memory for messages: NCCL has no tags, and hangs if two ranks send to each
        other first."""
        x, tensor = self._checked(x, collective, name)
        if tensor.device.type != "cpu":
            where = f"comm.engine=torchdist, {collective} {name!r}"
            raise UserError(
                f"{collective} of {x.dtype} on {tensor.device}: messages are in host memory only",
                where,
                "copy it to the host first",
            )
        return x, tensor

    def _checked(self, x: Buffer, collective: str, name: str) -> tuple[Buffer, torch.Tensor]:
        """Returns x, or a copy if it is read-only, and a view of it as a tensor."""
        check_buffer(self, x, collective, name)
        x = writable(x)
        return x, x.detach() if hasattr(x, "detach") else torch.from_numpy(x)


class Pending:
    """A Handle."""

    def __init__(
        self, works: Sequence[Any], x: Buffer, blocks: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> None:
        """blocks: views of x with copies of them; the works modify the copies, which are then
        copied to x."""
        self._works = works
        self._x = x
        self._blocks = blocks

    def drop(self) -> None:
        """Makes the handle void, because the ranks have changed."""
        self._works = []

    def wait(self) -> Buffer:
        for work in self._works:
            work.wait()
        for theirs, copy in self._blocks:
            theirs.copy_(copy)
        return self._x


def _reducible(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, as int32 if it is int16."""
    return tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor


def _like(x: Buffer, tensor: torch.Tensor) -> Buffer:
    """Returns the tensor, as an array if x is one."""
    return tensor if hasattr(x, "detach") else tensor.numpy()
