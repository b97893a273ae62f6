"""The gradient of each collective by Horovod's definition, on torch, TensorFlow, JAX and Keras, as
one program for the ranks.

python tests/support/gradients_on_ranks.py OUT.json MODULE        writes {check: failure or ""};
    MODULE: hvdtrain.horovod or horovod.torch
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

hvd = importlib.import_module(sys.argv[2])
IS_HOROVOD = sys.argv[2] == "horovod.torch"
NEAR = 1e-12
COLUMNS = 2
ROWS = 3
# whose gradients Horovod reduces by the same op: no derivative
AS_DERIVATIVES = (
    "min",
    "max",
    "product",
)
# JAX has to know their shapes
OF_ANY_ROWS = (
    "uneven allgather",
    "empty allgather",
    "alltoall of splits",
    "grouped_allgather",
)
Call = Callable[[Any], Any]


class Case(NamedTuple):
    rows: Callable[[int], int]  # rank -> of its tensor
    call: Callable[[Any, Any], Any]  # of a module of Horovod's, and the tensor
    gradient: Callable[[int], np.ndarray]  # rank -> of its tensor
    ranks: tuple[int, ...] | None = None  # of a process set


def inputs(rank: int, rows: int) -> np.ndarray:
    """Numbers above 0 whose extremes are on different ranks; the first is the same on all."""
    found = np.sin(np.arange(1.0 * rows * COLUMNS) * 3 + 2 * rank).reshape(rows, COLUMNS) + 2.0
    found[:1, 0] = 2.0
    return found


def weights(rank: int, rows: int) -> np.ndarray:
    """What the result of this rank is multiplied by: the gradient that comes back into the
    collective."""
    return (1.0 + rank) * (1.0 + np.arange(1.0 * rows * COLUMNS).reshape(rows, COLUMNS))


def summed(rows: int = ROWS) -> np.ndarray:
    return np.sum([weights(rank, rows) for rank in range(hvd.size())], 0)


def of_extreme(pick: Callable[..., np.ndarray]) -> Callable[[int], np.ndarray]:
    """The sum of the gradients, in equal parts on the ranks that have the extreme; times the
    factors 2 and 3."""

    def gradient(rank: int) -> np.ndarray:
        everybody = np.stack([inputs(other, ROWS) for other in range(hvd.size())])
        flags = everybody == pick(everybody, 0)
        return summed() * flags[rank] / flags.sum(0) * 6.0

    return gradient


def of_product(rank: int) -> np.ndarray:
    return summed() * np.prod(
        [inputs(other, ROWS) for other in range(hvd.size()) if other != rank], 0
    )


def of_adasum(_: int) -> np.ndarray:
    """Adasum of two multiples of a vector is their average (Maleki et al. 2020, arXiv:2006.02924,
    eq. 7). Of three: 0 and 2, then 1."""
    first, second, third = (weights(rank, ROWS) for rank in (0, 1, 2))
    return (first + second) / 2 if hvd.size() == 2 else ((first + third) / 2 + second) / 2


def of_gathered(rows_of: Callable[[int], int]) -> Callable[[int], np.ndarray]:
    """The average over ranks of the gradients of a rank's rows."""

    def gradient(rank: int) -> np.ndarray:
        start = sum(map(rows_of, range(rank)))
        total = sum(map(rows_of, range(hvd.size())))
        return summed(total)[start : start + rows_of(rank)] / hvd.size()

    return gradient


def splits(rank: int) -> list[int]:
    """How many rows a rank sends to each."""
    return [1 + (rank + other) % 2 for other in range(hvd.size())]


def of_exchanged(rank: int) -> np.ndarray:
    """Returns the gradients of the ranks that the rows were sent to; 0 for the last row, which was
    not sent."""
    parts = []
    for other in range(hvd.size()):
        counts = [splits(sender)[other] for sender in range(hvd.size())]
        start = sum(counts[:rank])
        parts.append(weights(other, sum(counts))[start : start + counts[rank]])
    return np.concatenate([*parts, np.zeros((1, COLUMNS))])


def of_equal_parts(rank: int) -> np.ndarray:
    rows = 2 * hvd.size()
    return np.concatenate(
        [weights(other, rows)[2 * rank : 2 * rank + 2] for other in range(hvd.size())]
    )


def of_scattered(factor: float) -> Callable[[int], np.ndarray]:
    """The gradients of all ranks' rows: three on the first rank, two on the others."""
    return lambda _: (
        factor * np.concatenate([weights(rank, 2 + (rank == 0)) for rank in range(hvd.size())])
    )


def cases() -> dict[str, Case]:
    size = hvd.size()
    last = hvd.size() - 1
    factors: dict[str, Any] = {"prescale_factor": 2.0, "postscale_factor": 3.0}

    def same(rank: int) -> int:
        return ROWS

    def growing(rank: int) -> int:
        return rank + 1

    def even(rank: int) -> int:
        return 2 * rank

    def scattered(rank: int) -> int:
        return 2 * size + 1

    found = {
        "average": Case(
            same, lambda m, x: m.allreduce(x, name="average"), lambda _: summed() / size
        ),
        "sum": Case(
            same, lambda m, x: m.allreduce(x, op=hvd.Sum, **factors), lambda _: summed() * 6.0
        ),
        "min": Case(same, lambda m, x: m.allreduce(x, op=hvd.Min, **factors), of_extreme(np.min)),
        "max": Case(same, lambda m, x: m.allreduce(x, op=hvd.Max, **factors), of_extreme(np.max)),
        "product": Case(
            same, lambda m, x: m.allreduce(x, op=hvd.Product, name="product"), of_product
        ),
        "adasum": Case(same, lambda m, x: m.allreduce(x, op=hvd.Adasum), of_adasum),
        "allgather": Case(same, lambda m, x: m.allgather(x, name="allgather"), of_gathered(same)),
        "uneven allgather": Case(growing, lambda m, x: m.allgather(x), of_gathered(growing)),
        "empty allgather": Case(even, lambda m, x: m.allgather(x), of_gathered(even)),
        "broadcast": Case(
            same, lambda m, x: m.broadcast(x, last), lambda rank: summed() / size * (rank == last)
        ),
        "alltoall": Case(lambda _: 2 * size, lambda m, x: m.alltoall(x), of_equal_parts),
        "alltoall of splits": Case(
            lambda rank: sum(splits(rank)) + (not IS_HOROVOD),
            lambda m, x: m.alltoall(x, torch.tensor(splits(hvd.rank()), dtype=torch.int32))[0],
            lambda rank: (
                of_exchanged(rank)[:-1] if IS_HOROVOD else of_exchanged(rank)
            ),  # all rows are sent there
        ),
        "reducescatter": Case(
            scattered, lambda m, x: m.reducescatter(x, op=hvd.Average), of_scattered(1.0)
        ),
        "reducescatter of sums": Case(
            scattered,
            lambda m, x: m.reducescatter(x, op=hvd.Sum, **factors),
            of_scattered(6.0 * size),
        ),
        "grouped_allreduce": Case(
            same,
            lambda m, x: m.grouped_allreduce([x, x * 2], op=hvd.Sum)[1],
            lambda _: 2 * summed(),
        ),
        "grouped_allgather": Case(
            growing,
            lambda m, x: m.grouped_allgather([x * 2, x])[0],
            lambda rank: 2 * of_gathered(growing)(rank),
        ),
        "grouped_reducescatter": Case(
            scattered,
            lambda m, x: m.grouped_reducescatter([x * 2, x], op=hvd.Average)[0],
            of_scattered(2.0),
        ),
    }
    if IS_HOROVOD:
        return {
            name: case for name, case in found.items() if name not in (*AS_DERIVATIVES, "adasum")
        }
    if size > 2:
        some = hvd.add_process_set([0, size - 1])
        both = weights(0, ROWS) + weights(last, ROWS)
        found["sum of some"] = Case(
            same,
            lambda m, x: m.allreduce(x, op=hvd.Sum, process_set=some),
            lambda _: both,
            (0, last),
        )
        found["broadcast to some"] = Case(
            same,
            lambda m, x: m.broadcast(x, last, process_set=some),
            lambda rank: both / 2 * (rank == last),
            (0, last),
        )
    return found


def of_torch(call: Call, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    tensor = torch.tensor(x, requires_grad=True)
    (call(tensor) * torch.tensor(weight)).sum().backward()
    assert tensor.grad is not None
    return tensor.grad.numpy()


def of_tensorflow(compiled: bool) -> Callable[[Call, np.ndarray, np.ndarray], np.ndarray]:
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")  # each case is a new function

    def gradient(call: Call, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        def work(tensor: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(tensor)
                loss = tf.reduce_sum(call(tensor) * weight)
            return tape.gradient(loss, tensor)

        found: np.ndarray = (tf.function(work) if compiled else work)(tf.constant(x)).numpy()
        return found

    return gradient


def of_jax(compiled: bool) -> Callable[[Call, np.ndarray, np.ndarray], np.ndarray]:
    import jax

    def gradient(call: Call, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        work = jax.grad(lambda tensor: (call(tensor) * weight).sum())
        return np.asarray((jax.jit(work) if compiled else work)(jax.numpy.asarray(x)))

    return gradient


def ways() -> dict[str, tuple[Any, Callable[[Call, np.ndarray, np.ndarray], np.ndarray]]]:
    if IS_HOROVOD:
        return {"horovod": (hvd, of_torch)}
    keras, tensorflow = (
        importlib.import_module(f"hvdtrain.horovod.{name}") for name in ("keras", "tensorflow")
    )
    return {
        "torch": (hvd, of_torch),
        "keras on torch": (keras, of_torch),
        "tensorflow": (tensorflow, of_tensorflow(False)),
        "tf.function": (tensorflow, of_tensorflow(True)),
        "keras on tensorflow": (keras, of_tensorflow(True)),
        "jax.grad": (keras, of_jax(False)),
        "jax.jit": (keras, of_jax(True)),
    }


def result_rows(name: str, case: Case, rank: int) -> int:
    """Returns the number of rows that the call returns on this rank."""
    everybody = range(hvd.size())
    if "allgather" in name:
        return sum(case.rows(other) for other in everybody)
    if "splits" in name:
        return sum(splits(other)[rank] for other in everybody)
    return 2 + (rank == 0) if "reducescatter" in name else case.rows(rank)


def failures() -> dict[str, str]:
    found: dict[str, str] = {}
    rank = hvd.rank()
    for way, (module, gradient) in ways().items():
        for name, case in cases_of(way, module).items():
            x = inputs(rank, case.rows(rank))
            weight = weights(rank, result_rows(name, case, rank))
            try:
                result = gradient(lambda tensor: case.call(module, tensor), x, weight)  # noqa: B023 (called in this turn)
                expected = case.gradient(rank)
                is_right = (
                    result.shape == expected.shape
                    and np.abs(result - expected).max(initial=0.0) < NEAR * 1e3
                )
                found[f"{way}: {name}"] = (
                    "" if is_right else f"rank {rank}: {result.tolist()}, not {expected.tolist()}"
                )
            except Exception:
                found[f"{way}: {name}"] = traceback.format_exc()
    return found


def second_derivatives() -> dict[str, str]:
    """Compares second derivatives in compiled functions with torch's: of the gradient of
    sum(call(x) ** 3), times weights."""
    import jax
    import tensorflow as tf

    keras, tensorflow = (
        importlib.import_module(f"hvdtrain.horovod.{name}") for name in ("keras", "tensorflow")
    )
    rank = hvd.rank()
    x = inputs(rank, ROWS)
    weight = np.cos(weights(rank, ROWS))
    found = {}
    for name in ("sum", "min", "product", "allgather", "broadcast"):
        call = ALL[name].call
        leaf = torch.tensor(x, requires_grad=True)
        (first,) = torch.autograd.grad((call(hvd, leaf) ** 3).sum(), leaf, create_graph=True)
        expected = torch.autograd.grad((first * torch.tensor(weight)).sum(), leaf)[0].numpy()

        def by_tensorflow(tensor: Any, call: Any = call) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(tensor)
                with tf.GradientTape() as inner:
                    inner.watch(tensor)
                    loss = tf.reduce_sum(call(tensorflow, tensor) ** 3)
                total = tf.reduce_sum(inner.gradient(loss, tensor) * weight)
            return outer.gradient(total, tensor)

        def by_jax(tensor: Any, call: Any = call) -> Any:
            gradient = jax.grad(lambda inner: (call(keras, inner) ** 3).sum())
            return jax.grad(lambda outer: (gradient(outer) * weight).sum())(tensor)

        for way, result in (
            ("tf.function", tf.function(by_tensorflow)(tf.constant(x))),
            ("jax.jit", jax.jit(by_jax)(jax.numpy.asarray(x))),
        ):
            is_right = np.allclose(np.asarray(result), expected, rtol=1e-9)
            found[f"{way}: {name} twice"] = (
                ""
                if is_right
                else f"rank {rank}: {np.asarray(result).tolist()}, not {expected.tolist()}"
            )
    return found


ALL: dict[str, Case] = {}


def cases_of(way: str, module: Any) -> dict[str, Case]:
    if not ALL:
        ALL.update(cases())
    known = {
        name: case for name, case in ALL.items() if case.ranks is None or hvd.rank() in case.ranks
    }
    return {
        name: case
        for name, case in known.items()
        if not (way.startswith("jax") and name in OF_ANY_ROWS)
        and not ("grouped" in name and not hasattr(module, name))
    }


def main() -> None:
    hvd.init()
    found = failures()
    if not IS_HOROVOD and hvd.size() == 2:
        found |= second_derivatives()
    for other in hvd.allgather_object(found):
        for name, failure in other.items():
            found[name] = found.get(name) or failure
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
