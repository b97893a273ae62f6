"""alltoall and its asynchronous form."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.perform import check_splits
from hvdtrain.horovod.handles import synchronize
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.start import Call
from hvdtrain.horovod.tensors import own

Splits = torch.Tensor | Sequence[int] | None


def alltoall_async(tensor: Any, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins to send each rank its rows of the tensor: splits[r] of them, in order, or equal parts.

    synchronize() gives the rows received, in the order of ranks, and how many came from each: as splits' own dtype and device.
    """
    call = Call("alltoall", tensor, name, process_set)
    call.needs_rows()
    rows, size = len(call.tensors[0]), process_set.size() or 1
    if splits is None:
        if rows % size:
            what = f"splits not provided, but the first dimension {rows} is not an even multiple of {size} ranks"
            raise BadCall(what, call.where, "splits=[...], a number of rows for each rank")
        numbers = [rows // size] * size
    else:
        listed = splits.tolist() if hasattr(splits, "tolist") else list(splits)
        if any(not isinstance(n, Integral) for n in listed):
            raise BadCall(f"splits of {type(listed[0]).__name__}", call.where, "splits=[...], a whole number of rows for each rank")
        numbers = [int(n) for n in listed]
    check_splits(numbers, rows, size, call.where)
    like = splits if isinstance(splits, torch.Tensor) else torch.empty(0, dtype=torch.int32, device="cpu")
    (back,) = call.backs

    def finish(results: Any) -> tuple[Any, torch.Tensor]:
        ((found, received),) = results
        return back(found), torch.tensor(received, dtype=like.dtype, device=like.device)

    return call.start(any_rows=True, splits=numbers, finish=finish)


def alltoall(tensor: Any, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The rows that every rank sends to this one; where splits are given, (rows, received splits). Gradients go through it."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        found, received = _Alltoall.apply(tensor, splits, name, process_set)
    else:
        found, received = synchronize(alltoall_async(tensor, splits, name, process_set))
    return found if splits is None else (found, received)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Any:
        found, received = synchronize(alltoall_async(tensor, splits, name, process_set))
        sent = len(tensor) if splits is None else sum(int(n) for n in splits)
        ctx.received, ctx.process_set, ctx.kept = received, process_set, len(tensor) - sent
        ctx.mark_non_differentiable(received)
        return own(found), received

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found, _ = alltoall(grads[0], ctx.received, None, ctx.process_set)
        rest = found.new_zeros((ctx.kept, *found.shape[1:]))  # of rows that were sent to nobody
        return (torch.cat([found, rest]) if ctx.kept else found), None, None, None
