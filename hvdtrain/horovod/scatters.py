"""reducescatter and its forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdtrain.horovod.compression import Compression, Compressor
from hvdtrain.horovod.engine.errors import BadCall, NoSuchReduction
from hvdtrain.horovod.gathers import grouped_allgather
from hvdtrain.horovod.handles import synchronize
from hvdtrain.horovod.ops import Adasum, Average, Sum
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.start import Call
from hvdtrain.horovod.tensors import own


def reducescatter_async(
    tensor: Any,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Begins a reduction of which each rank gets its rows: equally many, the first ranks one more. op: all but Adasum."""
    return _start(Call("reducescatter", tensor, name, process_set), op, prescale_factor, postscale_factor)


def grouped_reducescatter_async(
    tensors: Sequence[Any],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """A reducescatter_async() of several tensors as one request. synchronize() gives a tuple."""
    return _start(Call("reducescatter", tensors, name, process_set, grouped=True), op, prescale_factor, postscale_factor)


def _start(call: Call, op: int, prescale: float, postscale: float) -> int:
    call.needs_rows()
    if op == Adasum:
        raise NoSuchReduction("reducescatter has no Adasum", call.where, "another op; or hvd.allreduce(), and the rows of this rank")
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
    """This rank's rows of the reduction over the ranks of the process set. Gradients go through it."""
    wire, ctx = compression.compress(tensor)
    if isinstance(wire, torch.Tensor) and wire.requires_grad and torch.is_grad_enabled():
        (found,) = _Reducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, False, wire)
    else:
        found = synchronize(reducescatter_async(wire, name, op, process_set, prescale_factor, postscale_factor))
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
    """A reducescatter() of several tensors as one request."""
    compressed = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    if torch.is_grad_enabled() and any(isinstance(wire, torch.Tensor) and wire.requires_grad for wire in wires):
        found = _Reducescatter.apply(name, op, process_set, prescale_factor, postscale_factor, True, *wires)
    else:
        found = synchronize(grouped_reducescatter_async(wires, name, op, process_set, prescale_factor, postscale_factor))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, compressed, strict=True)]


class _Reducescatter(torch.autograd.Function):
    """The gradients are those of the ranks' rows; of a sum, times the number of ranks, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any, name: str | None, op: int, process_set: ProcessSet, pre: float, post: float, grouped: bool, *tensors: torch.Tensor
    ) -> Any:
        call = Call("reducescatter", list(tensors) if grouped else tensors[0], name, process_set, grouped=grouped)
        if op not in (Average, Sum):
            raise BadCall(
                "gradients go through a reducescatter of Average or Sum alone", call.where, "hvd.allreduce(), and this rank's rows"
            )
        found = synchronize(_start(call, op, pre, post))
        ctx.factor = pre * post * ((process_set.size() or 1) if op == Sum else 1)
        ctx.process_set = process_set
        return tuple(map(own, found if grouped else [found]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        scaled = [grad * ctx.factor if ctx.factor != 1 else grad for grad in grads]
        return (None, None, None, None, None, None, *grouped_allgather(scaled, None, ctx.process_set))
