"""A store of torch.distributed whose values are signed by the job: what another process wrote counts as absent."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hvdtrain.comm.signed.objects import Forged, pack, unpack


class SignedStore:
    """One connection to the store. Its methods raise RuntimeError where the connection is broken or a wait takes too long."""

    def __init__(self, store: Any, secret: str) -> None:
        self._store, self._secret = store, secret

    def set(self, key: str, value: Any) -> None:
        """Returns before the store has the value."""
        self._store.set(key, pack(value, self._secret, key))

    def set_first(self, key: str, value: Any) -> Any:
        """Sets the value where the key has none; returns what the store then has, as get()."""
        return self._read(key, self._store.compare_set(key, "", pack(value, self._secret, key)))

    def get(self, key: str) -> Any:
        """The value, which must be there; None where it is not one that a process with the job's secret has set under this key."""
        return self._read(key, self._store.get(key))

    def _read(self, key: str, packed: bytes) -> Any:
        with contextlib.suppress(Forged):
            return unpack(packed, self._secret, key)
        return None

    def has(self, *keys: str) -> bool:
        """Whether each has a value, of whatever origin."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._store.wait(list(keys), timeout)

    def add(self, counter: str, amount: int) -> int:
        return int(self._store.add(counter, amount))

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)
