"""allreduce and its forms: asynchronous, in place, grouped; the blocking ones support autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.horovod import gradients
from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import (
    CollectiveCall,
    Compression,
    Compressor,
    Product,
    as_non_view,
    given_op,
    synchronize,
)


def allreduce_async(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Begins a reduction over the ranks of the process set; synchronize() gives a new tensor.

    op: Average (default), Sum, Min, Max, Product or Adasum; prescale_factor multiplies the tensor
    before, postscale_factor after. Every rank gives the same name, shape and dtype. `average` is a
    former name of `op`.
    """
    call = CollectiveCall("allreduce", tensor, name, process_set)
    return call.start_reduction(given_op(op, average), prescale_factor, postscale_factor)


def allreduce_async_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an in-place allreduce."""
    call = CollectiveCall("allreduce", tensor, name, process_set, in_place=True)
    return call.start_reduction(given_op(op, average), prescale_factor, postscale_factor)


def grouped_allreduce_async(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an allreduce of several tensors as one request; their dtypes may differ. synchronize()
    gives a tuple."""
    call = CollectiveCall("allreduce", tensors, name, process_set, grouped=True)
    return call.start_reduction(given_op(op, average), prescale_factor, postscale_factor)


def grouped_allreduce_async_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an in-place allreduce of several tensors as one request."""
    call = CollectiveCall("allreduce", tensors, name, process_set, grouped=True, in_place=True)
    return call.start_reduction(given_op(op, average), prescale_factor, postscale_factor)


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduces in place."""
    return synchronize(
        allreduce_async_(
            tensor,
            None,
            name,
            given_op(op, average),
            prescale_factor,
            postscale_factor,
            process_set,
        )
    )


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Any, ...]:
    """Reduces several tensors in place as one request."""
    op = given_op(op, average)
    reduced: tuple[Any, ...] = synchronize(
        grouped_allreduce_async_(
            tensors, None, name, op, prescale_factor, postscale_factor, process_set
        )
    )
    return reduced


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the reduction over the ranks of the process set: allreduce_async(), waited for.
    Gradients go through it."""
    op = given_op(op, average)
    wire, ctx = compression.compress(tensor)
    if isinstance(wire, torch.Tensor) and wire.requires_grad and torch.is_grad_enabled():
        (found,) = _Allreduce.apply(
            op, name, prescale_factor, postscale_factor, process_set, False, wire
        )
    else:
        found = synchronize(
            allreduce_async(wire, None, name, op, prescale_factor, postscale_factor, process_set)
        )
    return compression.decompress(found, ctx)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduces several tensors as one request."""
    op = given_op(op, average)
    compressed = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    if torch.is_grad_enabled() and any(
        isinstance(wire, torch.Tensor) and wire.requires_grad for wire in wires
    ):
        found = _Allreduce.apply(
            op, name, prescale_factor, postscale_factor, process_set, True, *wires
        )
    else:
        found = synchronize(
            grouped_allreduce_async(
                wires, None, name, op, prescale_factor, postscale_factor, process_set
            )
        )
    return [
        compression.decompress(tensor, ctx)
        for tensor, (_, ctx) in zip(found, compressed, strict=True)
    ]


class _Allreduce(torch.autograd.Function):
    """An allreduce with gradients. A backward() through it frees nothing: as in Horovod, a second
    one is possible, or one for each tensor of a group."""

    @staticmethod
    def forward(
        ctx: Any,
        op: int,
        name: str | None,
        pre: float,
        post: float,
        process_set: ProcessSet,
        grouped: bool,
        *tensors: torch.Tensor,
    ) -> Any:
        call = CollectiveCall(
            "allreduce",
            list(tensors) if grouped else tensors[0],
            name,
            process_set,
            grouped=grouped,
        )
        found = synchronize(call.start_reduction(op, pre, post))
        results = tuple(map(as_non_view, found if grouped else [found]))
        ctx.op = op
        ctx.factors = (pre, post)
        ctx.reduce = reduce_over(process_set, grouped)
        ctx.where = call.where
        # here: a backward() frees nothing of it
        ctx.shares = gradients.shares(op, ctx.factors, tensors, results)
        ctx.has_zeros = op == Product and any(bool((x == 0).any()) for x in tensors)
        if op == Product:  # its second derivative goes through the values
            ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shares = ctx.shares
        if ctx.op == Product and torch.is_grad_enabled():
            count = len(ctx.saved_tensors) // 2
            shares = gradients.shares(
                ctx.op, ctx.factors, ctx.saved_tensors[:count], ctx.saved_tensors[count:]
            )
        found = gradients.of_allreduce(ctx.op, ctx.factors, grads, shares, ctx.reduce, Torch())
        gradients.refuse_zeros(ctx.has_zeros, ctx.where)
        return (None, None, None, None, None, None, *found)


def reduce_over(process_set: ProcessSet, grouped: bool = True) -> gradients.Reduce:
    """Reductions over a process set, through which gradients go."""

    def reduce(
        tensors: list[torch.Tensor], op: int, before: float, after: float
    ) -> list[torch.Tensor]:
        how: dict[str, Any] = {
            "op": op,
            "prescale_factor": before,
            "postscale_factor": after,
            "process_set": process_set,
        }
        return grouped_allreduce(tensors, **how) if grouped else [allreduce(tensors[0], **how)]

    return reduce


class Torch:
    """The torch operations that gradients need."""

    def cast(self, flags: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return flags.to(like.dtype)

    def choose(self, flags: torch.Tensor | bool, tensor: torch.Tensor) -> torch.Tensor:
        found = (
            flags if isinstance(flags, torch.Tensor) else torch.tensor(flags, device=tensor.device)
        )
        # its gradient goes to the tensor on every rank
        return torch.where(found, tensor, torch.zeros_like(tensor))

    def constant(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def padded(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.cat([tensor, tensor.new_zeros((rows, *tensor.shape[1:]))])
