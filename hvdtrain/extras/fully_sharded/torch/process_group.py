"""A torch.distributed backend over any Communicator: FSDP2, DTensor and other parts of torch that
use process groups also run over plain MPI.

torch's wheels have Gloo and NCCL; their MPI backend has to be compiled in. A subclass of
ProcessGroup in Python needs no compiler. Each collective is one of the communicator's, so sums are
bit-identical to comm.reduce=bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from hvdtrain.comm.communicator import Communicator, Handle, Op, part_of, point_to_point
from hvdtrain.errors import UserError

BACKEND = "hvdtrain"
DEVICES = ["cpu", "cuda", "xpu"]
Tensors = list[torch.Tensor]


def start_process_group(world: Communicator) -> None:
    """Makes `world` torch's default process group if torch has none yet. Every rank calls it."""
    if dist.is_initialized():
        return
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=DEVICES)
    dist.init_process_group(
        BACKEND, store=dist.HashStore(), rank=world.rank, world_size=world.size, pg_options=world
    )


def _create(options: Any, world: Communicator) -> CommunicatorGroup:
    return CommunicatorGroup(world, options.group_id)


# its methods have several signatures; torch calls the following
_ProcessGroup: Any = dist.ProcessGroup


class CommunicatorGroup(_ProcessGroup):
    """A torch process group on a Communicator. Its methods have the names that torch 2.13 calls,
    and those that older versions call. A tensor on a device that the engine does not support is
    copied through host memory. Messages from one rank to another need the feature "p2p". Products
    are not supported."""

    def __init__(self, communicator: Communicator, name: str) -> None:
        super().__init__(communicator.rank, communicator.size)
        self._communicator = communicator
        self._name = name
        self._takes_devices = "device_memory" in communicator.features

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return BACKEND

    @property
    def bound_device_id(self) -> None:
        return None

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return BACKEND

    def getBackendName(self) -> str:
        return BACKEND

    def name(self) -> str:
        return BACKEND

    def new_group(
        self, ranks: Sequence[int], *, group_name: str, **_: Any
    ) -> CommunicatorGroup | None:
        """Creates a group; dist.new_group() and DeviceMesh call it on every rank. None if this rank
        is not in it."""
        own = self._communicator.split(0 if self.rank() in ranks else None)
        return None if own is None else CommunicatorGroup(own, group_name)

    def allreduce(self, tensors: Tensors, options: Any) -> Work:
        op, divisor = self._op(options.reduceOp)
        waits = [self._start_allreduce(tensor, op, divisor) for tensor in tensors]
        return Work(tensors, waits)

    def allreduce_coalesced(self, tensors: Tensors, options: Any) -> Work:
        return self.allreduce(tensors, options)

    def broadcast(self, tensors: Tensors, options: Any) -> Work:
        for tensor in tensors:
            self._broadcast(tensor, options.rootRank)
        return Work(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Work:
        waits = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            flat = tensor.new_empty(self.size() * tensor.numel())
            waits += [self._start_gather(flat, tensor), _split_into(flat, parts)]
        return Work([part for parts in outputs for part in parts], waits)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any = None
    ) -> Work:
        return Work([output], [self._start_gather(output, tensor)])

    _allgather_base = all_gather_single

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any = None
    ) -> Work:
        return Work(
            outputs,
            [
                self._start_gather(output, tensor)
                for output, tensor in zip(outputs, inputs, strict=True)
            ],
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, options: Any
    ) -> Work:
        return Work([output], [self._start_reduce_scatter(output, tensor, options.reduceOp)])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, options: Any
    ) -> Work:
        pairs = zip(outputs, inputs, strict=True)
        return Work(
            outputs,
            [
                self._start_reduce_scatter(output, tensor, options.reduceOp)
                for output, tensor in pairs
            ],
        )

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Work:
        """Broadcasts all parts; each rank keeps its own."""
        (output,) = outputs
        flat = output.new_empty(self.size() * output.numel())
        if self.rank() == options.rootRank:
            flat = torch.cat([part.reshape(-1) for part in inputs[0]])
        self._broadcast(flat, options.rootRank)
        output.copy_(flat[part_of(len(flat), self.rank(), self.size())].view(output.shape))
        return Work(outputs)

    def alltoall_base(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_rows: list[int],
        rows: list[int],
        options: Any,
    ) -> Work:
        """Runs an allgather; each rank keeps its part. Each rank needs memory for everything that
        all ranks send."""
        rows = rows or [len(tensor) // self.size()] * self.size()
        cuts = self._communicator.allgather(
            torch.tensor(rows, device="cpu"), f"{self._name}.rows"
        ).view(self.size(), -1)
        gathered = self._communicator.allgather(
            _as_bytes(self._host(tensor)), f"{self._name}.alltoall"
        ).view(tensor.dtype)
        row = tensor[0].numel() if len(tensor) else 1
        sources = gathered.split([int(n) * row for n in cuts.sum(1)])
        parts = [
            source.split([int(n) * row for n in cut])[self.rank()]
            for source, cut in zip(sources, cuts, strict=True)
        ]
        output.copy_(torch.cat(parts).view(output.shape))
        return Work([output])

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        ranks = point_to_point(self._communicator, "torch.distributed.send")
        handles = [
            ranks.start_send(tensor.detach().cpu().contiguous(), to, f"{self._name}.send", tag)
            for tensor in tensors
        ]
        return Work(tensors, [_finish(handle) for handle in handles])

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        ranks = point_to_point(self._communicator, "torch.distributed.recv")
        found = [torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu") for tensor in tensors]
        handles = [ranks.start_recv(x, source, f"{self._name}.recv", tag) for x in found]
        return Work(
            tensors,
            [_finish(handle, tensor) for handle, tensor in zip(handles, tensors, strict=True)],
        )

    def barrier(self, opts: Any = None) -> Work:
        self._communicator.allreduce(torch.zeros(1, device="cpu"), f"{self._name}.barrier")
        return Work([])

    def _start_allreduce(self, tensor: torch.Tensor, op: Op, divisor: int) -> Callable[[], None]:
        handle = self._communicator.start_allreduce(
            self._host(tensor).clone(), f"{self._name}.allreduce", op
        )
        return lambda: _take(tensor, handle.wait(), divisor)

    def _start_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Callable[[], None]:
        """Starts to gather every rank's tensor, in rank order. Writes directly into `output` if it
        is contiguous memory that the engine supports."""
        whole = _as_bytes(self._host(output))
        whole[part_of(len(whole), self.rank(), self.size())] = _as_bytes(self._host(tensor))
        handle = self._communicator.start_spread(whole, f"{self._name}.allgather")

        def wait() -> None:
            found = handle.wait()
            if not _is_memory_of(found, output):
                _take(output, found.view(output.dtype).view(output.shape))

        return wait

    def _start_reduce_scatter(
        self, output: torch.Tensor, tensor: torch.Tensor, op: Any
    ) -> Callable[[], None]:
        name, divisor = self._op(op)
        if name != "sum":
            raise UserError(
                f"{BACKEND} has no reduce-scatter of {name}",
                f"comm.engine={self._communicator.name}",
                "comm.engine=torchdist",
            )
        flat = self._host(tensor).reshape(-1).clone()  # the engine may overwrite it
        handle = self._communicator.start_reduce_scatter(flat, f"{self._name}.reduce_scatter")
        return lambda: _take(output, handle.wait().view(output.shape), divisor)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> None:
        data = _as_bytes(self._host(tensor))
        found = self._communicator.broadcast(data, f"{self._name}.broadcast", root)
        if not _is_memory_of(found, tensor):
            _take(tensor, found.view(tensor.dtype).view(tensor.shape))

    def _host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, contiguous and on a device that the engine supports."""
        return (tensor.detach() if self._takes_devices else tensor.detach().cpu()).contiguous()

    def _op(self, op: Any) -> tuple[Op, int]:
        """Returns the engine's operation and the divisor of the result."""
        names: list[tuple[Any, Op]] = [
            (dist.ReduceOp.SUM, "sum"),
            (dist.ReduceOp.MIN, "min"),
            (dist.ReduceOp.MAX, "max"),
        ]
        for theirs, ours in names:
            if op == theirs:
                return ours, 1
        if op == dist.ReduceOp.AVG:
            return "sum", self.size()
        raise UserError(
            f"{BACKEND} has no reduction {op}",
            f"comm.engine={self._communicator.name}",
            "comm.engine=torchdist",
        )


class Work(dist._Work):  # torch's base class for other backends
    """Pending collectives."""

    def __init__(self, tensors: Tensors, waits: Sequence[Callable[[], None]] = ()) -> None:
        super().__init__()
        self._tensors = tensors
        self._waits = list(waits)

    def wait(self, timeout: Any = None) -> bool:
        while self._waits:
            self._waits.pop(0)()
        return True

    def is_completed(self) -> bool:
        """Waits for the collective, because an engine cannot be polled, and a polling loop would
        never end."""
        return self.wait()

    def is_success(self) -> bool:
        return True

    def result(self) -> Tensors:
        self.wait()
        return self._tensors

    def get_future(self) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(self.result())
        return future


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view as bytes, for collectives that only move data, of any dtype."""
    return (
        tensor.view(-1).view(torch.uint8)
        if tensor.numel()
        else tensor.new_empty(0, dtype=torch.uint8)
    )


def _is_memory_of(found: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two tensors share memory, without data_ptr(), which tensors without values do not
    have."""
    return found.untyped_storage()._cdata == tensor.untyped_storage()._cdata


@torch.no_grad()
def _take(tensor: torch.Tensor, found: torch.Tensor, divisor: int = 1) -> None:
    tensor.copy_(found if divisor == 1 else found / divisor)


def _finish(handle: Handle, tensor: torch.Tensor | None = None) -> Callable[[], None]:
    """Waits for a message, and copies it to the receiving tensor."""

    def wait() -> None:
        found = handle.wait()
        if tensor is not None:
            _take(tensor, found)

    return wait


def _split_into(flat: torch.Tensor, parts: Tensors) -> Callable[[], None]:
    def wait() -> None:
        for part, found in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            _take(part, found.view(part.shape))

    return wait
