"""A reduction to the owners of parts, and an all-gather, in one call of torch.distributed, as NCCL has them: for parts of equal length."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

# torch 2.13 has given both other names
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class EvenParts:
    """The rows of a tensor, in parts of equal length for each rank: the tensor itself, or a copy where it does not split evenly.

    In the copy the parts of the last ranks have a row more, with any numbers, than communicator.part_of() gives them.
    """

    def __init__(self, tensor: torch.Tensor, rank: int, size: int) -> None:
        """tensor: on the rank `rank` of `size` ranks."""
        self._tensor, self._size = tensor, size
        self._rows = -(-len(tensor) // size)
        self._is_copy = self._rows * size != len(tensor)
        self._even = tensor.new_empty((self._rows * size, *tensor.shape[1:])) if self._is_copy else tensor
        self._own = self._even[rank * self._rows : (rank + 1) * self._rows]
        for theirs, even in self.blocks():
            even.copy_(theirs)

    def blocks(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of the same rows of the tensor and of its copy; none without a copy."""
        if not self._is_copy:
            return []
        more, shape = len(self._tensor) % self._size, self._tensor.shape[1:]
        longer, shorter = self._tensor.tensor_split([more * self._rows])
        even = self._even.view(self._size, self._rows, *shape)
        return [
            (longer.view(more, self._rows, *shape), even[:more]),
            (shorter.view(self._size - more, self._rows - 1, *shape), even[more:, : self._rows - 1]),
        ]

    def reduce(self, group: Any) -> tuple[list[Any], torch.Tensor]:
        """Starts the sum over ranks; this rank's part, with the row more, takes it. Other parts have any numbers afterwards."""
        return [_reduce_scatter(self._own, self._even, group=group, async_op=True)] if self._even.numel() else [], self._own

    def gather(self, group: Any) -> list[Any]:
        """Starts to give each rank's part to all; the tensor has them then, or blocks() the copy of it."""
        if not self._even.numel():
            return []
        return [_all_gather(as_bytes(self._even), as_bytes(self._own), group=group, async_op=True)]


def gather_rows(tensor: torch.Tensor, size: int, group: Any) -> torch.Tensor:
    """The tensor of each rank, which have one shape, as a new one with an axis of ranks before the others."""
    gathered = tensor.new_empty((size, *tensor.shape))
    if tensor.numel():
        _all_gather(as_bytes(gathered), as_bytes(tensor), group=group)
    return gathered


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A view of the tensor as bytes, for collectives that only move data: neither library has all number types."""
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
