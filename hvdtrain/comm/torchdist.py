"""The torchdist engine: torch.distributed, with NCCL for tensors on GPUs and Gloo for those in host memory and for numpy arrays."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from hvdtrain.comm import mpi
from hvdtrain.comm.communicator import Buffer, Communicator, Handle, Op, check_buffer, writable
from hvdtrain.comm.features import Feature
from hvdtrain.comm.placement import Placement
from hvdtrain.comm.rendezvous import (
    LOOPBACK,
    Rendezvous,
    host_to_connect,
    interface_of,
    listen,
    listening_address,
    local_address,
    rendezvous,
)
from hvdtrain.comm.side_channel.store import StoreSideChannel
from hvdtrain.config.schema import CommConfig
from hvdtrain.core.exit import exit_now, flush_output
from hvdtrain.errors import UserError

FEATURES: set[Feature] = {"several_ranks", "device_memory", "asynchronous", "bfloat16_sums", "ddp"}
LEAVE_S = 10.0  # for all ranks to say that they are done


def has_nccl() -> bool:
    """Whether there is a GPU that this torch can use, and NCCL between GPUs."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Meets the other ranks: at comm.address, where the launcher's variables say, or where rank 0 tells by MPI."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise UserError("this torch was built without torch.distributed", "comm.engine=torchdist", "comm.engine=mpi, or another torch")
    comm = comm or CommConfig()
    limit = timedelta(seconds=comm.timeout_s)
    if place.size == 1:
        _start(dist.HashStore(), place, limit)
        return TorchDistCommunicator(place, None, None)
    meet, messenger = rendezvous(place, os.environ, comm.address), None
    if meet is None:
        messenger = mpi.connect(place)
        meet = _told_by(messenger)
    store = _enter(meet, place, limit)
    _wait_for_all(store, meet, place, limit)
    _use_network_to(meet, place)
    _start(dist.PrefixStore("group", store), place, limit)
    board = (
        None if messenger else StoreSideChannel(lambda: dist.PrefixStore(meet.job, _connection(meet, place, limit)), place.rank, place.size)
    )
    return TorchDistCommunicator(place, messenger, board)


def _told_by(messenger: Communicator) -> Rendezvous:
    """An address of rank 0 and a port that is free there a moment ago: by MPI to all."""
    hosts = messenger.allgather_object(socket.gethostname())
    told: Rendezvous | UserError | None = None
    if messenger.rank == 0:
        try:
            address = listening_address(hosts, hosts[0])
            with listen(Rendezvous(address, 0), address == LOOPBACK) as probe:
                told = Rendezvous(address, probe.getsockname()[1])
        except UserError as error:
            told = error
    told = messenger.allgather_object(told)[0]
    if isinstance(told, UserError):
        raise told
    assert told is not None
    return told


def _enter(meet: Rendezvous, place: Placement, limit: timedelta) -> Any:
    """The store of this job, which rank 0 keeps unless the launcher does."""
    if place.rank == 0 and not meet.hosted:
        listener = listen(meet, place.local_size == place.size)
        host, port = listener.getsockname()[:2]
        store = dist.TCPStore(
            host, port, place.size, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    else:
        store = _connection(meet, place, limit)
    return dist.PrefixStore(meet.job, store)


def _connection(meet: Rendezvous, place: Placement, limit: timedelta) -> Any:
    host = host_to_connect(meet, place.local_size == place.size)
    try:
        return dist.TCPStore(host, meet.port, None, is_master=False, timeout=limit, wait_for_workers=False)
    except dist.DistError as error:
        what = f"nobody answers where the ranks meet within {limit.total_seconds():g} s: {str(error).splitlines()[0]}"
        fix = "start all ranks within that time, or comm.timeout_s=...; or comm.address=HOST:PORT that every host reaches"
        raise UserError(what, f"{host}:{meet.port}, from {socket.gethostname()}", fix) from None


def _wait_for_all(store: Any, meet: Rendezvous, place: Placement, limit: timedelta) -> None:
    """Refuses two processes of one rank, and names those that do not come."""
    where = f"{meet.host}:{meet.port}"
    if store.add(f"rank/{place.rank}", 1) > 1:
        raise UserError(f"two processes are rank {place.rank}", where, "one launcher, one job at an address; comm.address=HOST:PORT")
    store.set(f"here/{place.rank}", "")
    try:
        store.wait([f"here/{rank}" for rank in range(place.size)], limit)
    except dist.DistError:
        missing = [str(rank) for rank in range(place.size) if not store.check([f"here/{rank}"])]
        if not missing:
            return
        what = f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:16])} did not come within {limit.total_seconds():g} s"
        raise UserError(what, where, "look for their own errors; or comm.timeout_s=...") from None


def _use_network_to(meet: Rendezvous, place: Placement) -> None:
    """Gloo goes by the address of the host's own name, which often is a loopback one; the user's choice wins."""
    address = local_address(meet, place.local_size == place.size)
    name = interface_of(address) if address else None
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _start(store: Any, place: Placement, limit: timedelta) -> None:
    backend = "cpu:gloo,cuda:nccl" if has_nccl() else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=limit)
    except RuntimeError as error:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        if "Unable to find address" not in str(error) or name is None:
            raise
        where = f"GLOO_SOCKET_IFNAME={name}, rank {place.rank} on {socket.gethostname()}"
        fix = "unset it, or an interface that this host has (ip -br address)"
        raise UserError("there is no such network interface", where, fix) from None


class TorchDistCommunicator:
    """Works in place on x's memory where it can. int16, which neither library knows, is summed through int32 and cast back."""

    name = "torchdist"

    def __init__(self, place: Placement, messenger: Communicator | None, board: StoreSideChannel | None) -> None:
        """One of the two speaks while main threads hang: MPI where it started the ranks, else the board."""
        self.rank, self.size = place.rank, place.size
        nccl: set[Feature] = {"nccl"} if has_nccl() else set()
        self.features = frozenset(FEATURES | nccl)
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self._messenger, self._board = messenger, board
        self._ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self.start_allreduce(x, name, op).wait()

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        x, tensor = self._accepted(x, "allreduce", name)
        wide = _widen(tensor)
        return Reduction(dist.all_reduce(wide, self._ops[op], async_op=True), (x, tensor, wide))

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        x, tensor = self._accepted(x, "broadcast", name)
        dist.broadcast(_bits(tensor), root)
        return x

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        """A whole allreduce, of which this rank keeps its part: shares are uneven, and Gloo has no other."""
        x, tensor = self._accepted(x, "reduce_scatter", name)
        summed = _widen(tensor).clone()
        dist.all_reduce(summed)
        return _like(x, summed.tensor_split(self.size)[self.rank].to(tensor.dtype).clone())

    def allgather(self, x: Buffer, name: str) -> Buffer:
        """Every part travels with as many rows as the longest has."""
        x, tensor = self._accepted(x, "allgather", name)
        mine = torch.tensor([len(tensor)], device=tensor.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        lengths = [int(row) for row in rows]
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather([_bits(part) for part in parts], _bits(padded))
        return _like(x, torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]))

    def allgather_object(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def side_channel_gather(self, text: str, wait_s: float) -> list[str | None] | None:
        speaker = self._messenger.side_channel_gather if self._messenger else self._board.gather if self._board else None
        return speaker(text, wait_s) if speaker else [text]

    def abort(self, code: int) -> NoReturn:
        flush_output()
        if self._messenger:
            self._messenger.abort(code)
        if self._board:
            self._board.abort(code)
        exit_now(code)

    def close(self) -> None:
        if self._board:
            self._board.close(LEAVE_S)
        dist.destroy_process_group()

    def _accepted(self, x: Buffer, collective: str, name: str) -> tuple[Buffer, torch.Tensor]:
        """x, or a copy if it is read-only, and its memory as a tensor."""
        check_buffer(self, x, collective, name)
        x = writable(x)
        return x, x.detach() if hasattr(x, "detach") else torch.from_numpy(x)


class Reduction:
    """An allreduce under way."""

    def __init__(self, work: Any, buffers: tuple[Buffer, torch.Tensor, torch.Tensor]) -> None:
        self._work, self._buffers = work, buffers

    def wait(self) -> Buffer:
        self._work.wait()
        x, tensor, wide = self._buffers
        if wide is not tensor:
            tensor.copy_(wide)
        return x


def _widen(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory as bytes: data that is moved needs no number type that the library knows."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _like(x: Buffer, tensor: torch.Tensor) -> Buffer:
    return tensor if hasattr(x, "detach") else tensor.numpy()
