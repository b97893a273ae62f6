"""allgather and its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.horovod.handles import synchronize
from hvdtrain.horovod.ops import Average
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reductions import grouped_allreduce
from hvdtrain.horovod.start import Call
from hvdtrain.horovod.tensors import own


def allgather_async(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins to concatenate the tensors of all ranks along axis 0, whose lengths may differ; synchronize() gives a new tensor."""
    return _start(Call("allgather", tensor, name, process_set))


def grouped_allgather_async(tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """An allgather_async() of several tensors as one request. synchronize() gives a tuple."""
    return _start(Call("allgather", tensors, name, process_set, grouped=True))


def _start(call: Call) -> int:
    call.needs_rows()
    return call.start(any_rows=True)


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The tensors of all ranks along axis 0, in the order of ranks. Gradients go through it."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return _Allgather.apply(name, process_set, False, tensor)[0]
    return synchronize(allgather_async(tensor, name, process_set))


def grouped_allgather(tensors: Sequence[Any], name: str | None = None, process_set: ProcessSet = global_process_set) -> tuple[Any, ...]:
    """An allgather() of several tensors as one request."""
    if torch.is_grad_enabled() and any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors):
        return _Allgather.apply(name, process_set, True, *tensors)
    found: tuple[Any, ...] = synchronize(grouped_allgather_async(tensors, name, process_set))
    return found


class _Allgather(torch.autograd.Function):
    """The gradient is averaged over ranks, as Horovod's is."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: torch.Tensor) -> Any:
        found = synchronize(_start(Call("allgather", list(tensors) if grouped else tensors[0], name, process_set, grouped=grouped)))
        ctx.process_set, ctx.rows = process_set, [len(tensor) for tensor in tensors]
        return tuple(map(own, found if grouped else [found]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        process_set, rows = ctx.process_set, ctx.rows
        lengths = synchronize(allgather_async(torch.tensor([rows], device="cpu"), None, process_set))  # (ranks, tensors)
        before = lengths[: process_set.rank()].sum(0).tolist()
        reduced = grouped_allreduce(list(grads), op=Average, process_set=process_set)
        return (None, None, None, *(grad[start : start + own] for grad, start, own in zip(reduced, before, rows, strict=True)))
