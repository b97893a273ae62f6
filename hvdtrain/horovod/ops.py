"""The reduction operations, by Horovod's names and numbers."""

from __future__ import annotations

import warnings

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.requests import ReduceOp

Average, Sum, Adasum, Min, Max, Product = range(6)
_NAMES: tuple[ReduceOp, ...] = ("average", "sum", "adasum", "min", "max", "product")


def op_name(op: int, where: str) -> ReduceOp:
    """Raises ValueError for another number."""
    if not isinstance(op, int) or not 0 <= op < len(_NAMES):
        raise BadCall(f"op={op!r} is no reduction", where, "hvd.Average, Sum, Adasum, Min, Max or Product")
    return _NAMES[op]


def given_op(op: int | None, average: bool | None) -> int:
    """`average` is the former name of Average and Sum. Raises ValueError where both are given."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise BadCall(
            "The op parameter supersedes average. Please provide only one of them.", "hvd.allreduce()", "op=hvd.Average or hvd.Sum"
        )
    warnings.warn("Parameter `average` has been replaced with `op`", DeprecationWarning, stacklevel=4)
    return Average if average else Sum
