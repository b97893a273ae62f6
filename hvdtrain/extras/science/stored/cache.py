"""A cache of decoded blocks, limited in bytes. A block that several threads need is decoded
once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future

import numpy as np


class BlockCache:
    """The most recently used blocks. A copy in another process starts empty."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.decoded = 0  # number of blocks decoded so far
        self._bytes = 0
        self._room = most_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Hashable, Future[np.ndarray]] = OrderedDict()

    def __reduce__(self) -> tuple[object, ...]:
        return BlockCache, (self.most_bytes,)

    def leave_room(self, share: float) -> None:
        """Limits blocks to this share of the memory from now on; the rest is for samples kept for
        later."""
        self._room = int(self.most_bytes * share)

    def get(self, key: Hashable, decode: Callable[[], np.ndarray]) -> np.ndarray:
        """Returns a block, read-only; decode() is called if it is not in the cache. Safe to call
        from several threads. Raises what decode() raises."""
        with self._lock:
            block = self._blocks.get(key)
            if block is None:
                pending = self._blocks[key] = Future()
            else:
                self._blocks.move_to_end(key)
        return block.result() if block is not None else self._decode(key, pending, decode)

    def _decode(
        self, key: Hashable, pending: Future[np.ndarray], decode: Callable[[], np.ndarray]
    ) -> np.ndarray:
        try:
            block = decode()
        except BaseException as error:
            with self._lock:
                del self._blocks[key]
            pending.set_exception(error)
            raise
        block.setflags(write=False)
        pending.set_result(block)
        with self._lock:
            self.decoded += 1
            self._bytes += block.nbytes
            self._evict(key)
        return block

    def _evict(self, newest: Hashable) -> None:
        """Removes the oldest blocks, but never the newest; blocks being decoded do not count
        yet."""
        for key in [key for key, block in self._blocks.items() if block.done() and key != newest]:
            if self._bytes <= self._room:
                return
            self._bytes -= self._blocks.pop(key).result().nbytes
