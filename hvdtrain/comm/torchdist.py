"""The torchdist engine: torch.distributed, with NCCL for tensors on GPUs, and Gloo for tensors in host memory and for numpy arrays."""

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
    find_rendezvous,
    host_to_connect,
    interface_of,
    listen,
    listening_address,
    local_address,
)
from hvdtrain.comm.side_channel.store import StoreSideChannel
from hvdtrain.config.schema import CommConfig
from hvdtrain.core.exit import exit_now, flush_output
from hvdtrain.errors import UserError

FEATURES: set[Feature] = {"several_ranks", "device_memory", "asynchronous", "bfloat16_sums", "ddp"}
CLOSE_S = 10.0  # for all ranks to close


def has_nccl() -> bool:
    """Whether there is a GPU that this torch can use, and NCCL between GPUs."""
    return torch.cuda.is_available() and dist.is_nccl_available()


def connect(place: Placement, comm: CommConfig | None = None) -> Communicator:
    """Connects the ranks at comm.address, where the launcher's variables say, or at an address that rank 0 sends over MPI.

    Raises UserError where this torch has no torch.distributed, or the ranks do not find each other within comm.timeout_s.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise UserError("this torch was built without torch.distributed", "comm.engine=torchdist", "comm.engine=mpi, or another torch")
    comm = comm or CommConfig()
    timeout = timedelta(seconds=comm.timeout_s)
    if place.size == 1:
        _start_process_group(dist.HashStore(), place, timeout)
        return TorchDistCommunicator(place, None, None)
    rendezvous, mpi_communicator = find_rendezvous(place, os.environ, comm.address), None
    if rendezvous is None:
        mpi_communicator = mpi.connect(place)
        rendezvous = _rendezvous_over_mpi(mpi_communicator)
    store = _open_store(rendezvous, place, timeout)
    _wait_for_all_ranks(store, rendezvous, place, timeout)
    _set_gloo_interface(rendezvous, place)
    _start_process_group(dist.PrefixStore("group", store), place, timeout)
    if mpi_communicator is not None:
        return TorchDistCommunicator(place, mpi_communicator, None)
    side_channel = StoreSideChannel(
        lambda: dist.PrefixStore(rendezvous.job, _connect_to_store(rendezvous, place, timeout)), place.rank, place.size
    )
    return TorchDistCommunicator(place, None, side_channel)


def _rendezvous_over_mpi(communicator: Communicator) -> Rendezvous:
    """An address of rank 0, and a port that was free there a moment ago. Every rank calls it; raises UserError on all."""
    hosts = communicator.allgather_object(socket.gethostname())
    result: Rendezvous | UserError | None = None
    if communicator.rank == 0:
        try:
            address = listening_address(hosts, hosts[0])
            with listen(Rendezvous(address, 0), address == LOOPBACK) as probe:
                result = Rendezvous(address, probe.getsockname()[1])
        except UserError as error:
            result = error
    result = communicator.allgather_object(result)[0]
    if isinstance(result, UserError):
        raise result
    assert result is not None
    return result


def _open_store(rendezvous: Rendezvous, place: Placement, timeout: timedelta) -> Any:
    """The store of this job, which rank 0 hosts unless the launcher does."""
    if place.rank == 0 and not rendezvous.hosted:
        listener = listen(rendezvous, place.local_size == place.size)
        host, port = listener.getsockname()[:2]
        store = dist.TCPStore(
            host, port, place.size, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
    else:
        store = _connect_to_store(rendezvous, place, timeout)
    return dist.PrefixStore(rendezvous.job, store)


def _connect_to_store(rendezvous: Rendezvous, place: Placement, timeout: timedelta) -> Any:
    """A new connection. Raises UserError where rank 0 does not answer in time."""
    host = host_to_connect(rendezvous, place.local_size == place.size)
    try:
        return dist.TCPStore(host, rendezvous.port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    except dist.DistError as error:
        what = f"the rendezvous does not answer within {timeout.total_seconds():g} s: {str(error).splitlines()[0]}"
        fix = "start all ranks within that time, or comm.timeout_s=...; or comm.address=HOST:PORT that every host reaches"
        raise UserError(what, f"{host}:{rendezvous.port}, from {socket.gethostname()}", fix) from None


def _wait_for_all_ranks(store: Any, rendezvous: Rendezvous, place: Placement, timeout: timedelta) -> None:
    """Raises UserError where two processes have one rank, or ranks do not arrive in time."""
    where = f"{rendezvous.host}:{rendezvous.port}"
    if store.add(f"rank/{place.rank}", 1) > 1:
        raise UserError(f"two processes are rank {place.rank}", where, "one launcher, one job at an address; comm.address=HOST:PORT")
    store.set(f"here/{place.rank}", "")
    try:
        store.wait([f"here/{rank}" for rank in range(place.size)], timeout)
    except dist.DistError:
        missing = [str(rank) for rank in range(place.size) if not store.check([f"here/{rank}"])]
        if not missing:
            return
        what = f"rank{'s' * (len(missing) > 1)} {', '.join(missing[:16])} did not arrive within {timeout.total_seconds():g} s"
        raise UserError(what, where, "look for their own errors; or comm.timeout_s=...") from None


def _set_gloo_interface(rendezvous: Rendezvous, place: Placement) -> None:
    """Sets GLOO_SOCKET_IFNAME, unless the user did: Gloo's default is the address of the host's own name, often a loopback one."""
    address = local_address(rendezvous, place.local_size == place.size)
    name = interface_of(address) if address else None
    if name:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _start_process_group(store: Any, place: Placement, timeout: timedelta) -> None:
    """The default process group of torch.distributed. Raises UserError where GLOO_SOCKET_IFNAME names no interface."""
    backend = "cpu:gloo,cuda:nccl" if has_nccl() else "gloo"
    try:
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size, timeout=timeout)
    except RuntimeError as error:
        name = os.environ.get("GLOO_SOCKET_IFNAME")
        if "Unable to find address" not in str(error) or name is None:
            raise
        where = f"GLOO_SOCKET_IFNAME={name}, rank {place.rank} on {socket.gethostname()}"
        fix = "unset it, or an interface that this host has (ip -br address)"
        raise UserError("there is no such network interface", where, fix) from None


class TorchDistCommunicator:
    """Works in place on the memory of x where it can. int16, which neither library has, is summed through int32 and cast back."""

    name = "torchdist"

    def __init__(self, place: Placement, mpi_communicator: Communicator | None, store: StoreSideChannel | None) -> None:
        """The side channel is MPI's where MPI started the ranks, else the store's; one process has neither."""
        self.rank, self.size = place.rank, place.size
        nccl: set[Feature] = {"nccl"} if has_nccl() else set()
        self.features = frozenset(FEATURES | nccl)
        self.local_rank, self.local_size = place.local_rank, place.local_size
        self._mpi, self._store = mpi_communicator, store
        self._ops = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}

    def allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Buffer:
        return self.start_allreduce(x, name, op).wait()

    def start_allreduce(self, x: Buffer, name: str, op: Op = "sum") -> Handle:
        x, tensor = self._checked(x, "allreduce", name)
        operand = _reducible(tensor)
        return PendingAllreduce(dist.all_reduce(operand, self._ops[op], async_op=True), x, tensor, operand)

    def broadcast(self, x: Buffer, name: str, root: int = 0) -> Buffer:
        x, tensor = self._checked(x, "broadcast", name)
        dist.broadcast(_as_bytes(tensor), root)
        return x

    def reduce_scatter(self, x: Buffer, name: str) -> Buffer:
        """An allreduce, of which this rank keeps its part: Gloo has no reduce-scatter of uneven parts."""
        x, tensor = self._checked(x, "reduce_scatter", name)
        summed = _reducible(tensor).clone()
        dist.all_reduce(summed)
        return _like(x, summed.tensor_split(self.size)[self.rank].to(tensor.dtype).clone())

    def allgather(self, x: Buffer, name: str) -> Buffer:
        """Every part is padded to the rows of the longest."""
        x, tensor = self._checked(x, "allgather", name)
        mine = torch.tensor([len(tensor)], device=tensor.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(rows, mine)
        lengths = [int(row) for row in rows]
        padded = tensor.new_zeros((max(lengths), *tensor.shape[1:]))
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather([_as_bytes(part) for part in parts], _as_bytes(padded))
        return _like(x, torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]))

    def allgather_object(self, thing: Any) -> list[Any]:
        things: list[Any] = [None] * self.size
        dist.all_gather_object(things, thing)
        return things

    def side_channel_gather(self, message: str, wait_s: float) -> list[str | None] | None:
        if self._mpi is not None:
            return self._mpi.side_channel_gather(message, wait_s)
        if self._store is not None:
            return self._store.gather(message, wait_s)
        return [message]

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

    def _checked(self, x: Buffer, collective: str, name: str) -> tuple[Buffer, torch.Tensor]:
        """x, or a copy where it is read-only; and a view of it as a tensor."""
        check_buffer(self, x, collective, name)
        x = writable(x)
        return x, x.detach() if hasattr(x, "detach") else torch.from_numpy(x)


class PendingAllreduce:
    """A Handle."""

    def __init__(self, work: Any, x: Buffer, tensor: torch.Tensor, operand: torch.Tensor) -> None:
        """`tensor`: a view of x, which takes the sum; `operand`: what is reduced, the same or a copy of another type."""
        self._work = work
        self._x, self._tensor, self._operand = x, tensor, operand

    def wait(self) -> Buffer:
        self._work.wait()
        if self._operand is not self._tensor:
            self._tensor.copy_(self._operand)
        return self._x


def _reducible(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as int32 where it is int16."""
    return tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor as bytes, for collectives that only move data: neither library has all number types."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def _like(x: Buffer, tensor: torch.Tensor) -> Buffer:
    """The tensor, as an array where x is one."""
    return tensor if hasattr(x, "detach") else tensor.numpy()
