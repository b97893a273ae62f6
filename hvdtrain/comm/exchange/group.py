"""The exchange of the torchdist engine: an asynchronous all-gather of torch.distributed; announcements are keys of its store."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist


class GroupExchange:
    """Of a process group; its ranks call it in the same order as the group's other collectives."""

    threads = True

    def __init__(self, group: Any, rank: int, size: int, name: str) -> None:
        """group: None for all ranks. name: of this exchange, in the store that all share."""
        self._group, self._rank, self._size = group, rank, size
        self._store = dist.PrefixStore(f"exchange-{name}", dist.distributed_c10d._get_default_store())
        self._work, self._number = None, 0

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        self._number += 1
        self._work = dist.all_gather(list(torch.from_numpy(rows)), torch.from_numpy(block), self._group, async_op=True)

    def done(self) -> bool:
        assert self._work is not None, "nothing was started"
        if not self._work.is_completed():
            return False
        self._work.wait()  # raises where it has failed
        return True

    def announce(self) -> None:
        self._store.set(f"{self._number}/{self._rank}", "")

    def present(self) -> set[int]:
        return {rank for rank in range(self._size) if self._store.check([f"{self._number}/{rank}"])}

    def free(self) -> None:
        """Nothing: the group is that of a communicator."""
