"""The joules of a GPU by its power, read ten times a second: another way than the counter that a
job reads."""

from __future__ import annotations

import threading
import time
from typing import Any


class Board:
    """Counts inside its `with` block; 0 joules of a CPU."""

    def __init__(self, uuid: str) -> None:
        self.joules = 0.0
        self._uuid = uuid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._count, name="power of the board")

    def __enter__(self) -> Board:
        if self._uuid:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._uuid:
            self._thread.join()

    def _count(self) -> None:
        import pynvml

        nvml: Any = pynvml
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        last_s = time.monotonic()
        while not self._over.wait(0.1):
            watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1e3
            now_s = time.monotonic()
            self.joules += watts * (now_s - last_s)
            last_s = now_s
