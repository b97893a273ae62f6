"""broadcast, allgather, alltoall and reducescatter in all forms, and the sparse allreduce;
reductions.py has the other reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import torch

from hvdtrain.horovod import gradients
from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import (
    Adasum,
    Average,
    CollectiveCall,
    Compression,
    Compressor,
    as_non_view,
    synchronize,
)
from hvdtrain.horovod.engine.errors import BadCall, NoSuchReduction
from hvdtrain.horovod.engine.perform import check_splits
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.reductions import Torch, reduce_over

Splits = torch.Tensor | Sequence[int] | None


def broadcast_async(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts to broadcast the tensor of rank `root_rank` (a rank of the job, also in a process
    set); synchronize() returns a new tensor."""
    return _start_broadcast(
        CollectiveCall("broadcast", tensor, name, process_set), root_rank, process_set
    )


def broadcast_async_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts a broadcast_async() into the tensor itself."""
    return _start_broadcast(
        CollectiveCall("broadcast", tensor, name, process_set, in_place=True),
        root_rank,
        process_set,
    )


def _start_broadcast(call: CollectiveCall, root: int, process_set: ProcessSet) -> int:
    ranks = (
        JOB.engine.ranks_of(process_set.process_set_id)
        if process_set.process_set_id is not None
        else []
    )
    if ranks and root not in ranks:
        raise BadCall(
            f"invalid root rank {root} for the process set of ranks {ranks[:16]}",
            call.where,
            "one of these ranks",
        )
    return call.start(root=int(root))


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcasts in place."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the tensor of rank `root_rank` on every rank. Differentiable."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return _Broadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Any:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        return as_non_view(synchronize(broadcast_async(tensor, root_rank, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        is_root = JOB.engine.rank == ctx.root_rank
        return (
            gradients.of_broadcast(
                grads[0], is_root, reduce_over(ctx.process_set, grouped=False), Torch()
            ),
            None,
            None,
            None,
        )


def allgather_async(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts to concatenate the tensors of all ranks along axis 0, whose lengths may differ;
    synchronize() returns a new tensor."""
    return _start_gather(CollectiveCall("allgather", tensor, name, process_set))


def grouped_allgather_async(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather of several tensors as one request. synchronize() returns a tuple."""
    return _start_gather(CollectiveCall("allgather", tensors, name, process_set, grouped=True))


def _start_gather(call: CollectiveCall) -> int:
    call.needs_rows()
    return call.start(any_rows=True)


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the tensors of all ranks, concatenated along axis 0 in rank order. Differentiable."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return _Allgather.apply(name, process_set, False, tensor)[0]
    return synchronize(allgather_async(tensor, name, process_set))


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Any, ...]:
    """Gathers several tensors as one request."""
    if torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    ):
        return _Allgather.apply(name, process_set, True, *tensors)
    gathered: tuple[Any, ...] = synchronize(grouped_allgather_async(tensors, name, process_set))
    return gathered


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: torch.Tensor
    ) -> Any:
        found = synchronize(
            _start_gather(
                CollectiveCall(
                    "allgather",
                    list(tensors) if grouped else tensors[0],
                    name,
                    process_set,
                    grouped=grouped,
                )
            )
        )
        ctx.process_set = process_set
        ctx.rows = [len(tensor) for tensor in tensors]
        return tuple(map(as_non_view, found if grouped else [found]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        process_set = ctx.process_set
        rows = ctx.rows
        # (ranks, tensors)
        lengths = synchronize(
            allgather_async(torch.tensor([rows], device="cpu"), None, process_set)
        )
        before = lengths[: process_set.rank()].sum(0).tolist()
        return (
            None,
            None,
            None,
            *gradients.of_allgather(grads, before, rows, reduce_over(process_set)),
        )


def alltoall_async(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins to send each rank its rows of the tensor: splits[r] of them, in order, or equal parts.

    synchronize() returns the rows received, in rank order, and how many came from each, with the
    dtype and device of splits.
    """
    call = CollectiveCall("alltoall", tensor, name, process_set)
    call.needs_rows()
    rows = len(call.tensors[0])
    size = process_set.size() or 1
    if splits is None:
        if rows % size:
            what = (
                f"splits not provided, but the first dimension {rows} is not an even multiple of "
                f"{size} ranks"
            )
            raise BadCall(what, call.where, "splits=[...], a number of rows for each rank")
        numbers = [rows // size] * size
    else:
        listed = splits.tolist() if hasattr(splits, "tolist") else list(splits)
        if any(not isinstance(n, Integral) for n in listed):
            raise BadCall(
                f"splits contains a {type(listed[0]).__name__}",
                call.where,
                "splits=[...], a whole number of rows for each rank",
            )
        numbers = [int(n) for n in listed]
    check_splits(numbers, rows, size, call.where)
    like = (
        splits
        if isinstance(splits, torch.Tensor)
        else torch.empty(0, dtype=torch.int32, device="cpu")
    )
    (back,) = call.backs

    def finish(results: Any) -> tuple[Any, torch.Tensor]:
        ((found, received),) = results
        return back(found), torch.tensor(received, dtype=like.dtype, device=like.device)

    return call.start(any_rows=True, splits=numbers, finish=finish)


def alltoall(
    tensor: Any,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the rows that every rank sends to this one; (rows, received splits) if splits are
    given. Differentiable."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        found, received = _Alltoall.apply(tensor, splits, name, process_set)
    else:
        found, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return found if splits is None else (found, received)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> Any:
        found, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        sent = len(tensor) if splits is None else sum(int(n) for n in splits)
        ctx.received = received
        ctx.process_set = process_set
        ctx.unsent = len(tensor) - sent
        ctx.mark_non_differentiable(received)
        return as_non_view(found), received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        def exchange(grad: torch.Tensor, received: Any) -> Any:
            return alltoall(grad, received, None, ctx.process_set)[0]

        return (
            gradients.of_alltoall(grads[0], ctx.received, ctx.unsent or None, exchange, Torch()),
            None,
            None,
            None,
        )


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reduction that returns each rank its rows; if they do not divide evenly, the first
    ranks get one more. op: all except Adasum."""
    return _start_scatter(
        CollectiveCall("reducescatter", tensor, name, process_set),
        op,
        prescale_factor,
        postscale_factor,
    )


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reducescatter of several tensors as one request. synchronize() returns a tuple."""
    return _start_scatter(
        CollectiveCall("reducescatter", tensors, name, process_set, grouped=True),
        op,
        prescale_factor,
        postscale_factor,
    )


def _start_scatter(call: CollectiveCall, op: int, prescale: float, postscale: float) -> int:
    call.needs_rows()
    if op == Adasum:
        raise NoSuchReduction(
            "reducescatter has no Adasum",
            call.where,
            "another op; or hvd.allreduce(), and the rows of this rank",
        )
    return call.start_reduction(op, prescale, postscale)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Returns this rank's rows of the reduction over the ranks of the process set.
    Differentiable."""
    wire, ctx = compression.compress(tensor)
    if isinstance(wire, torch.Tensor) and wire.requires_grad and torch.is_grad_enabled():
        (found,) = _Reducescatter.apply(
            name, op, process_set, prescale_factor, postscale_factor, False, wire
        )
    else:
        found = synchronize(
            reducescatter_async(wire, name, op, process_set, prescale_factor, postscale_factor)
        )
    return compression.decompress(found, ctx)


def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Runs reducescatter for several tensors as one request."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    if torch.is_grad_enabled() and any(
        isinstance(wire, torch.Tensor) and wire.requires_grad for wire in wires
    ):
        found = _Reducescatter.apply(
            name, op, process_set, prescale_factor, postscale_factor, True, *wires
        )
    else:
        found = synchronize(
            grouped_reducescatter_async(
                wires, name, op, process_set, prescale_factor, postscale_factor
            )
        )
    return [
        compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(found, compressed, strict=True)
    ]


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        pre: float,
        post: float,
        grouped: bool,
        *tensors: torch.Tensor,
    ) -> Any:
        call = CollectiveCall(
            "reducescatter",
            list(tensors) if grouped else tensors[0],
            name,
            process_set,
            grouped=grouped,
        )
        gradients.check_reducescatter(op, call.where)
        found = synchronize(_start_scatter(call, op, pre, post))
        ctx.op = op
        ctx.factors = (pre, post)
        ctx.process_set = process_set
        return tuple(map(as_non_view, found if grouped else [found]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        def gather(tensors: list[torch.Tensor]) -> Any:
            return grouped_allgather(tensors, None, ctx.process_set)

        found = gradients.of_reducescatter(
            ctx.op, ctx.factors, ctx.process_set.size() or 1, grads, gather
        )
        return (None, None, None, None, None, None, *found)


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts a sum or an average of sparse tensors, by gathering their indices and values; the
    returned function waits for the result."""
    sparse = tensor if tensor.is_coalesced() else tensor.coalesce()
    names = (
        (None, None, None)
        if name is None
        else (f"{name}.indices", f"{name}.values", f"{name}.ranks")
    )
    indices = allgather_async(sparse.indices().t().contiguous(), names[0], process_set)
    values = allgather_async(sparse.values(), names[1], process_set)
    # ranks that are still active
    givers = allgather_async(
        torch.ones(1, dtype=torch.int64, device=tensor.device), names[2], process_set
    )
    shape = tensor.shape

    def wait() -> torch.Tensor:
        found_values = synchronize(values)
        found_indices = synchronize(indices)
        ranks = len(synchronize(givers))
        if op == Average:
            found_values = found_values / ranks
        return torch.sparse_coo_tensor(
            found_indices.t(),
            found_values,
            shape,
            device=found_values.device,
            check_invariants=False,
        )

    return wait
