"""The gradients of the collectives, as defined by Horovod 0.28.1, for torch, TensorFlow and JAX.

Each function takes the collectives of a library as arguments, which are differentiable, too, for
second derivatives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.horovod.call import Average, Max, Min, Product, Sum
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.libraries import TensorLibrary

# tensors, op, factor before, factor after
Reduce = Callable[[list[Any], int, float, float], list[Any]]
Factors = tuple[float, float]  # before the reduction, after it


def shares(
    op: int, factors: Factors, inputs: Sequence[Any], results: Sequence[Any]
) -> list[Any] | None:
    """Returns the information about values that of_allreduce() needs.

    For Min and Max: where a rank has the extreme value. For Product: the product of the other
    ranks, nan if the input is 0.
    """
    before, after = factors
    pairs = list(zip(inputs, results, strict=True))
    if op in (Min, Max):
        return [x * before * after == y for x, y in pairs]
    return [y / x for x, y in pairs] if op == Product else None


def of_allreduce(
    op: int,
    factors: Factors,
    grads: Sequence[Any],
    found_shares: Sequence[Any] | None,
    reduce: Reduce,
    library: TensorLibrary,
) -> list[Any]:
    """Returns the gradients of an allreduce, for the sum over ranks of each rank's function of the
    result.

    found_shares: the result of shares().

    Sums and averages are their own gradient, and so is Adasum, as in Horovod. For Min and Max, the
    gradient is divided equally among the ranks with the extreme value. For Product, each rank gets
    it times the product of the others. Horovod reduces these gradients by the same op, which is not
    a derivative.
    """
    before, after = factors
    if op not in (Min, Max, Product):
        return reduce(list(grads), op, before, after)
    summed = reduce(list(grads), Sum, 1.0, 1.0)
    assert found_shares is not None, f"op {op} without shares"
    if op == Product:
        return [grad * share for grad, share in zip(summed, found_shares, strict=True)]
    flags = [library.cast(share, grad) for share, grad in zip(found_shares, summed, strict=True)]
    # 0 ranks have a nan
    counts = [count + library.cast(count == 0, count) for count in reduce(flags, Sum, 1.0, 1.0)]
    found = zip(summed, found_shares, counts, strict=True)
    return [library.choose(share, grad) / count * (before * after) for grad, share, count in found]


def refuse_zeros(has_zeros: bool, where: str) -> None:
    """Raises BadCall for the gradient of a product with a zero. After of_allreduce(), so that no
    other rank waits for this one."""
    if has_zeros:
        raise BadCall(
            "hvd.Product has no gradient here if an input is 0",
            where,
            "op=hvd.Sum of logarithms, or inputs other than 0",
        )


def of_allgather(
    grads: Sequence[Any], starts: Sequence[Any], rows: Sequence[Any], reduce: Reduce
) -> list[Any]:
    """Returns this rank's rows of the average over ranks. starts, rows: their beginning and number
    in each tensor."""
    averages = reduce(list(grads), Average, 1.0, 1.0)
    return [
        grad[start : start + count]
        for grad, start, count in zip(averages, starts, rows, strict=True)
    ]


def of_broadcast(grad: Any, is_root: bool, reduce: Reduce, library: TensorLibrary) -> Any:
    """Returns the average over ranks on the root, zeros elsewhere."""
    (average,) = reduce([grad], Average, 1.0, 1.0)
    return library.choose(is_root, average)


def of_alltoall(
    grad: Any,
    received: Any,
    unsent: Any,
    exchange: Callable[[Any, Any], Any],
    library: TensorLibrary,
) -> Any:
    """Sends the rows back. received: rows from each rank, None for equal parts. unsent: rows that
    were not sent, None for none."""
    returned = exchange(grad, received)
    return returned if unsent is None else library.padded(returned, unsent)


def check_reducescatter(op: int, where: str) -> None:
    """Raises BadCall for an op without a gradient."""
    if op not in (Average, Sum):
        raise BadCall(
            "only a reducescatter with Average or Sum has gradients",
            where,
            "hvd.allreduce(), then take this rank's rows",
        )


def of_reducescatter(
    op: int,
    factors: Factors,
    size: int,
    grads: Sequence[Any],
    gather: Callable[[list[Any]], Sequence[Any]],
) -> list[Any]:
    """Returns the rows of all ranks; for a sum, times the number of ranks."""
    factor = factors[0] * factors[1] * (size if op == Sum else 1)
    return list(gather([grad * factor if factor != 1 else grad for grad in grads]))
