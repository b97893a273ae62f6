"""The gradients of an allreduce, of the sum over ranks of what each computes from its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdtrain.horovod.ops import Max, Min, Product, Sum

Reduce = Callable[[list[torch.Tensor], int, float, float], list[torch.Tensor]]  # tensors, op, prescale, postscale


def needs_values(op: int) -> bool:
    """Whether gradients() needs inputs and results."""
    return op in (Min, Max, Product)


def gradients(
    op: int,
    factors: tuple[float, float],
    grads: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    reduce: Reduce,
) -> list[torch.Tensor]:
    """factors: of before and after. inputs, results: empty where needs_values() is False.

    Sums and averages are their own gradient, and Adasum is taken for it, as in Horovod. Of Min and Max the gradient goes to the ranks that
    have the extreme, in equal parts; of Product to each as the product of the others. Horovod reduces these gradients by the same op, which
    is no derivative.
    """
    before, after = factors
    if not needs_values(op):
        return reduce(list(grads), op, before, after)
    summed = reduce(list(grads), Sum, 1.0, 1.0)
    if op == Product:
        others = [torch.where(x != 0, y / x, torch.zeros_like(y)) for x, y in zip(inputs, results, strict=True)]
        if any(bool((x == 0).any()) for x in inputs):
            raise NotImplementedError("the gradient of hvd.Product where an input is 0")
        return [grad * other for grad, other in zip(summed, others, strict=True)]
    is_extreme = [(x * before * after == y).to(grad.dtype) for x, y, grad in zip(inputs, results, summed, strict=True)]
    ranks = reduce(is_extreme, Sum, 1.0, 1.0)
    found = zip(summed, is_extreme, ranks, strict=True)
    return [grad * extreme / count.clamp(min=1) * (before * after) for grad, extreme, count in found]
