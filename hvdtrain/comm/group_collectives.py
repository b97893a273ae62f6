"""Collectives of a process group that torch.distributed has not itself: parts of equal length in one call, bytes, and exchanges."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdtrain.comm.exchange import WORDS, Word

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


class GroupExchange:
    """An exchange over a process group: an asynchronous all-gather; what ranks say of it is a key of its store.

    Its ranks call it in the same order as the group's other collectives.
    """

    threads = True

    def __init__(self, group: Any, rank: int, size: int, name: str) -> None:
        """group: None for all ranks. name: of this exchange, in the store that all share."""
        self._group, self._rank, self._size = group, rank, size
        self._store: Any = dist.PrefixStore(f"exchange-{name}", dist.distributed_c10d._get_default_store())
        self._work: Any = None
        self._number = 0

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        self._number += 1
        self._work = dist.all_gather(list(torch.from_numpy(rows)), torch.from_numpy(block), self._group, async_op=True)

    def done(self) -> bool:
        assert self._work is not None, "nothing was started"
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises where it has failed
        return True

    def say(self, word: Word) -> None:
        self._store.append(str(self._number), f"{self._rank} {word}\n")

    def said(self) -> dict[Word, set[int]]:
        key = str(self._number)
        lines = self._store.get(key).decode().splitlines() if self._store.check([key]) else []  # get() waits for a key
        return {word: {int(line.split()[0]) for line in lines if line.endswith(word)} for word in WORDS}

    def free(self) -> None:
        """Nothing: the group is that of a communicator."""
