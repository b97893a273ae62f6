"""Means over samples of the values that a script logs, summed on the device, and over ranks at a
sync point."""

from __future__ import annotations

import math
import zlib
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import allreduce_sums
from hvdtrain.core.metrics import Sums, check_one_number, scalar
from hvdtrain.errors import UserError

MOST_LATE = 16  # values, of steps that a device may still compute


class Logged:
    """What this rank has logged since the last read. Values may be device scalars: nothing waits
    for them."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[Any, float]] = {}  # name -> (value x weight added up, weights)
        self._late: deque[tuple[str, Any, float]] = deque()  # values that are not added yet

    def add(self, values: dict[str, Any], weight: float) -> None:
        """Adds values. Raises UserError for a value that is not a number."""
        for name, value in values.items():
            if hasattr(
                value, "block_until_ready"
            ):  # JAX without float64 on the device: summed on the host, some steps later
                check_one_number(name, value, "ctx.log()")
                self._sums.setdefault(name, (0.0, 0.0))
                self._late.append((name, value, weight))
            else:
                self._put(name, value, weight)
        while len(self._late) > MOST_LATE:
            self._put(*self._late.popleft())

    def _put(self, name: str, value: Any, weight: float) -> None:
        total, weights = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (
            total + scalar(name, value, "ctx.log()") * weight if weight else total,
            weights + weight,
        )

    def fingerprint(self) -> Sums:
        """Returns a fingerprint of the names, see names_fingerprint()."""
        return names_fingerprint(self._sums)

    def read(
        self, communicator: Communicator, fingerprints: Mapping[str, float]
    ) -> dict[str, float]:
        """Returns the means over the samples of all ranks; NaN if there were none. fingerprints:
        summed over all ranks. A collective.

        Raises UserError on every rank if ranks logged different names.
        """
        check_same_names(communicator, self._sums, fingerprints, "ctx.log()", "has logged")
        return self._means(communicator)

    def _means(self, communicator: Communicator) -> dict[str, float]:
        while self._late:
            self._put(*self._late.popleft())
        sums: Sums = {}
        for name, (total, weights) in self._sums.items():
            sums |= {f"{name}.sum": total, f"{name}.weight": weights}
        self._sums = {}
        if not sums:
            return {}
        sums_of_ranks = allreduce_sums(communicator, sums, "context.logged")
        return {
            name[:-4]: quotient(value, sums_of_ranks[f"{name[:-4]}.weight"])
            for name, value in sums_of_ranks.items()
            if name.endswith(".sum")
        }


def names_fingerprint(names: Collection[str]) -> Sums:
    """Returns a number computed from the names, and its square. Their sums over ranks show whether
    all ranks have the same names."""
    number = float(zlib.crc32(",".join(sorted(names)).encode()) & 0xFFFFF)
    return {"names": number, "squares": number * number}


def check_same_names(
    communicator: Communicator,
    own: Collection[str],
    fingerprints: Mapping[str, float],
    where: str,
    verb: str,
) -> None:
    """Raises UserError on every rank if names differ between ranks. A collective. fingerprints:
    summed over all ranks."""
    total = fingerprints["names"]
    squares = fingerprints["squares"]
    if total * total == squares * communicator.size:
        return
    names = [sorted(of_rank) for of_rank in communicator.allgather_object(sorted(own))]
    other = next(rank for rank, of_rank in enumerate(names) if of_rank != names[0])
    what = (
        f"rank 0 {verb} {', '.join(names[0]) or 'nothing'}, rank {other} "
        f"{', '.join(names[other]) or 'nothing'}"
    )
    raise UserError(what, where, "the same names on every rank, never under `if ctx.rank == 0`")


def check_mean(metrics: object) -> None:
    """Raises UserError for a value that ctx.mean() does not support."""
    where = "ctx.mean()"
    fix = 'ctx.mean({"accuracy": accuracy}, count=batch.count)'
    if not isinstance(metrics, Mapping) or any(not isinstance(name, str) for name in metrics):
        raise UserError(f"{metrics!r:.60} is not a mapping of names to numbers", where, fix)


def quotient(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
