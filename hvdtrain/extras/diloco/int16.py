"""Sums over ranks in integers of 16 bits, whose rounding errors each rank keeps for the next
sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.torch.strategy import reduction_device

LARGEST = 2**15 - 1


def sum_in_int16(
    communicator: Communicator,
    values: Sequence[torch.Tensor],
    residuals: Sequence[torch.Tensor],
    name: str,
) -> list[torch.Tensor]:
    """Returns the sums over ranks of (value + residual), rounded, and leaves in each residual what
    this rank's numbers lost (error feedback: Karimireddy 2019, arXiv:1901.09847). A collective.

    Integers count units of their tensor: the largest number on any rank over LARGEST / ranks, so
    that no sum overflows. Sums of integers are exact, so they have the same bits on every engine,
    in any order of the ranks. values are overwritten. A number that is not finite makes
    its tensor NaN on all ranks.
    """
    device = reduction_device(values[0].device, communicator)
    torch._foreach_add_(list(values), list(residuals))
    largest = torch.stack(
        # a parameter may have no elements, which have no maximum
        [value.abs().max() if value.numel() else value.sum() for value in values]
    )
    # some engines lose NaN in a maximum
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf).to(device)
    units = communicator.allreduce(largest, f"{name}.largest", "max").to(values[0].device)
    units = units / (LARGEST // communicator.size)
    integers = []
    for value, residual, unit in zip(values, residuals, units, strict=True):
        # NaN as an integer would change the number that shares its 32 bits, maybe of another tensor
        has_unit = (unit > 0) & unit.isfinite()
        rounded = torch.where(has_unit, value / unit, 0.0).round()
        integers.append(rounded.to(torch.int32).reshape(-1))
        torch.sub(value, rounded * unit, out=residual)
    packed = pack(torch.cat(integers)).to(device)
    summed = communicator.allreduce(packed, name).to(values[0].device)
    sizes = [value.numel() for value in values]
    parts = unpack(summed, sum(sizes)).split(sizes)
    return [
        part.view(value.shape).to(value.dtype) * unit
        for part, value, unit in zip(parts, values, units, strict=True)
    ]


def pack(integers: torch.Tensor) -> torch.Tensor:
    """Returns (ceil(n / 2),) int32 with two of the integers each, (n,) int32 of 16 bits. The sum of
    packed numbers is the packed sum while each sum has 16 bits.

    Not every engine sums int16: torch.distributed would send 32 bits for each.
    """
    even = torch.nn.functional.pad(integers, (0, len(integers) % 2))
    return even[0::2] + even[1::2] * 2**16


def unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the first `count` integers, int32: the inverse of pack()."""
    low = ((packed + 2**15) & (2**16 - 1)) - 2**15
    high = (packed - low) >> 16
    return torch.stack([low, high], dim=1).reshape(-1)[:count]
