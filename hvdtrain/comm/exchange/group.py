"""The exchange of the torchdist engine: an asynchronous all-gather of torch.distributed; what ranks say of it is a key of its store."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdtrain.comm.exchange import WORDS, Word


class GroupExchange:
    """An exchange over a process group; its ranks call it in the same order as the group's other collectives."""

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
