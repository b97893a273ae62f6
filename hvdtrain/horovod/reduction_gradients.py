"""The gradients of an allreduce, of the sum over ranks of what each computes from its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hvdtrain.horovod.ops import Max, Min, Product, Sum

Reduce = Callable[[list[torch.Tensor], int, float, float], list[torch.Tensor]]  # tensors, op, prescale, postscale


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
    """factors: of before and after. shares: what shares() gave.

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
