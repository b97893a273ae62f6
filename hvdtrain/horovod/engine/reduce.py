"""One reduction of a flat tensor over the ranks of a communicator, of every dtype that torch can add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from hvdtrain.comm.communicator import NUMBER_TYPES, Communicator
from hvdtrain.horovod.engine.adasum import adasum_
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.requests import name_of

GATHER_BYTES = 4 << 20  # of one piece that every rank gets from every other: what an engine cannot reduce by itself
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def check_op(op: str, dtype: torch.dtype, where: str) -> None:
    """Raises BadCall for a reduction that means nothing."""
    if dtype.is_floating_point:
        return
    wrong = ""
    if dtype.is_complex and op in ("min", "max", "adasum"):
        wrong = "complex numbers have no order" if op != "adasum" else "Adasum is for real numbers"
    elif dtype == torch.bool and op == "average":
        wrong = "an average of bool is no bool"
    elif op == "adasum":
        wrong = "Adasum is for floating-point numbers"
    if wrong:
        fix = "hvd.Sum or hvd.Max (or), hvd.Min or hvd.Product (and)" if dtype == torch.bool else "another op, or convert it first"
        raise BadCall(f"no {op} of {name_of(dtype)}: {wrong}", where, fix)


def start_reduce_(communicator: Communicator, flat: torch.Tensor, op: str, name: str) -> Callable[[], None]:
    """Begins to replace a contiguous tensor of one dimension by its reduction over ranks; what it returns waits for the result.

    op: sum, min, max, product, adasum. A bool is a sum or maximum where any is, a minimum or product where all are.
    """
    if flat.numel() == 0 or communicator.size == 1:
        return lambda: None
    if op == "adasum":
        return lambda: adasum_(communicator, flat, name)
    if flat.dtype in _REAL and op == "sum":
        return start_reduce_(communicator, torch.view_as_real(flat).view(-1), op, name)
    if flat.dtype == torch.bool:
        return start_reduce_(communicator, flat.view(torch.uint8), "max" if op in ("sum", "max") else "min", name)
    dtype = name_of(flat.dtype)
    sums_half = dtype == "bfloat16" and op == "sum" and "bfloat16_sums" in communicator.features
    if op != "product" and (dtype in NUMBER_TYPES or sums_half):
        handle = communicator.start_allreduce(flat, name, op)  # type: ignore[arg-type]  # one of sum, min, max here
        return lambda: _take(flat, handle.wait())
    return lambda: _reduce_gathered_(communicator, flat, op, name)


def _take(flat: torch.Tensor, found: torch.Tensor) -> None:
    if found.data_ptr() != flat.data_ptr():
        flat.copy_(found)


def _reduce_gathered_(communicator: Communicator, flat: torch.Tensor, op: str, name: str) -> None:
    """In the order of ranks, with the rounding of the dtype at each step: the same bits on every rank."""
    step = max(1, GATHER_BYTES // flat.element_size())
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        parts = communicator.allgather(piece.view(torch.uint8), name).view(flat.dtype).view(communicator.size, -1)
        total = parts[0].clone()
        for part in parts[1:]:
            combine(op, total, part, total)
        piece.copy_(total)


def reduced(op: str, parts: Sequence[torch.Tensor], own: int) -> torch.Tensor:
    """In the order of ranks. parts: of each rank, of which all but that of rank `own` may be overwritten."""
    if len(parts) == 1:
        return parts[0].clone()
    total = combine(op, parts[0], parts[1], parts[1] if own == 0 else parts[0])
    for part in parts[2:]:
        combine(op, total, part, total)
    return total


def combine(op: str, one: torch.Tensor, other: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Elementwise, into `out` or new memory. By numpy for the unsigned integers that torch does not compute with."""
    if name_of(one.dtype) in ("uint16", "uint32", "uint64"):
        function = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}[op]
        return torch.from_numpy(function(one.numpy(), other.numpy(), out=None if out is None else out.numpy()))
    return _OPS[op](one, other, out=out)


def neutral(op: str, dtype: torch.dtype) -> float | bool:
    """What a rank that has joined gives: it leaves the result to the others."""
    if op not in ("min", "max", "product"):
        return 0
    if op == "product":
        return 1
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return float("inf") if op == "min" else float("-inf")
    limits = torch.iinfo(dtype)
    return limits.max if op == "min" else limits.min
