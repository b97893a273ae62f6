"""Factors of a reduction: before it, after it, and the division of an average."""

from __future__ import annotations

import torch


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """In place. Integers are multiplied in float64 and truncated towards zero, as Horovod does."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.to(torch.float64).mul_(factor).trunc_())


def average_(tensor: torch.Tensor, ranks: int, factor: float) -> None:
    """The sum over so many ranks, divided, and multiplied by `factor`, in place. Integers are divided exactly, then truncated."""
    if factor != 1.0 or tensor.is_floating_point() or tensor.is_complex():
        scale_(tensor, factor / ranks)
    elif tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # in host memory: torch does not divide them
        array = tensor.numpy()
        array //= ranks
    else:
        tensor.div_(ranks, rounding_mode="trunc")
