"""allreduce and its forms: asynchronous, in place, grouped; autograd goes through those that wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.call import Call, Compression, Compressor, Max, Min, Product, Sum, given_op, own, synchronize

Reduce = Callable[[list[torch.Tensor], int, float, float], list[torch.Tensor]]  # tensors, op, prescale, postscale


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

    op: Average (default), Sum, Min, Max, Product or Adasum; prescale_factor multiplies the tensor before, postscale_factor after. Every
    rank gives the same name, shape and dtype. `average` is a former name of `op`.
    """
    call = Call("allreduce", tensor, name, process_set)
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
    """An allreduce_async() into the tensor itself."""
    call = Call("allreduce", tensor, name, process_set, in_place=True)
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
    """An allreduce_async() of several tensors as one request; their dtypes may differ. synchronize() gives a tuple."""
    call = Call("allreduce", tensors, name, process_set, grouped=True)
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
    """A grouped_allreduce_async() into the tensors themselves."""
    call = Call("allreduce", tensors, name, process_set, grouped=True, in_place=True)
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
    """An allreduce() into the tensor itself."""
    return synchronize(allreduce_async_(tensor, None, name, given_op(op, average), prescale_factor, postscale_factor, process_set))


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Any, ...]:
    """A grouped_allreduce() into the tensors themselves."""
    op = given_op(op, average)
    found: tuple[Any, ...] = synchronize(grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set))
    return found


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
    """The reduction over the ranks of the process set: allreduce_async(), waited for. Gradients go through it."""
    op = given_op(op, average)
    wire, ctx = compression.compress(tensor)
    if isinstance(wire, torch.Tensor) and wire.requires_grad and torch.is_grad_enabled():
        (found,) = _Allreduce.apply(op, name, prescale_factor, postscale_factor, process_set, False, wire)
    else:
        found = synchronize(allreduce_async(wire, None, name, op, prescale_factor, postscale_factor, process_set))
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
    """An allreduce() of several tensors as one request."""
    op = given_op(op, average)
    compressed = [compression.compress(tensor) for tensor in tensors]
    wires = [wire for wire, _ in compressed]
    if torch.is_grad_enabled() and any(isinstance(wire, torch.Tensor) and wire.requires_grad for wire in wires):
        found = _Allreduce.apply(op, name, prescale_factor, postscale_factor, process_set, True, *wires)
    else:
        found = synchronize(grouped_allreduce_async(wires, None, name, op, prescale_factor, postscale_factor, process_set))
    return [compression.decompress(tensor, ctx) for tensor, (_, ctx) in zip(found, compressed, strict=True)]


class _Allreduce(torch.autograd.Function):
    """A backward() through it frees nothing: a second one, or one for each tensor of a group, is possible as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any, op: int, name: str | None, pre: float, post: float, process_set: ProcessSet, grouped: bool, *tensors: torch.Tensor
    ) -> Any:
        call = Call("allreduce", list(tensors) if grouped else tensors[0], name, process_set, grouped=grouped)
        found = synchronize(call.start_reduction(op, pre, post))
        results = tuple(map(own, found if grouped else [found]))
        ctx.op, ctx.factors, ctx.process_set, ctx.grouped = op, (pre, post), process_set, grouped
        ctx.shares = shares(op, ctx.factors, tensors, results)
        if op == Product:  # of which the second derivative goes through the values
            ctx.save_for_backward(*tensors, *results)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        def reduce(tensors: list[torch.Tensor], op: int, pre: float, post: float) -> list[torch.Tensor]:
            factors: dict[str, Any] = {"op": op, "prescale_factor": pre, "postscale_factor": post, "process_set": ctx.process_set}
            return grouped_allreduce(tensors, **factors) if ctx.grouped else [allreduce(tensors[0], **factors)]

        found_shares = ctx.shares
        if ctx.op == Product and torch.is_grad_enabled():
            count = len(ctx.saved_tensors) // 2
            found_shares = shares(ctx.op, ctx.factors, ctx.saved_tensors[:count], ctx.saved_tensors[count:])
        found = gradients(ctx.op, ctx.factors, list(grads), found_shares, reduce)
        return (None, None, None, None, None, None, *found)


def shares(
    op: int, factors: tuple[float, float], inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> list[torch.Tensor] | None:
    """What gradients() needs of the values for Min, Max and Product, found where they are known: a backward() frees nothing of it.

    Of Min and Max where a rank has the extreme; of Product the product of the others. None where the op, or a 0 in a product, has none.
    """
    before, after = factors
    pairs = list(zip(inputs, results, strict=True))
    if op in (Min, Max):
        return [x * before * after == y for x, y in pairs]
    if op != Product or any(bool((x == 0).any()) for x in inputs):
        return None
    return [y / x for x, y in pairs]


def gradients(
    op: int, factors: tuple[float, float], grads: Sequence[torch.Tensor], shares: Sequence[torch.Tensor] | None, reduce: Reduce
) -> list[torch.Tensor]:
    """The gradients of an allreduce, of the sum over ranks of what each computes from its result.

    factors: of before and after. shares: what shares() gave.

    Sums and averages are their own gradient, and Adasum is taken for it, as in Horovod. Of Min and Max the gradient goes to the ranks that
    have the extreme, in equal parts; of Product to each as the product of the others. Horovod reduces these gradients by the same op, which
    is no derivative.
    """
    before, after = factors
    if op not in (Min, Max, Product):
        return reduce(list(grads), op, before, after)
    summed = reduce(list(grads), Sum, 1.0, 1.0)
    if shares is None:
        raise NotImplementedError("the gradient of hvd.Product where an input is 0")
    if op == Product:
        return [grad * share for grad, share in zip(summed, shares, strict=True)]
    is_extreme = [share.to(grad.dtype) for share, grad in zip(shares, summed, strict=True)]
    ranks = reduce(is_extreme, Sum, 1.0, 1.0)
    found = zip(summed, is_extreme, ranks, strict=True)
    return [grad * extreme / count.clamp(min=1) * (before * after) for grad, extreme, count in found]
