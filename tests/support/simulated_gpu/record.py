"""What a simulated GPU records of a process: waits of the host, devices that threads use, races."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

PACKAGE = "hvdtrain"
# between a collective and what calls for it
ENGINE = ("/comm/torchdist.py", "/comm/torch_groups.py", "/comm/communicator.py")
HERE = str(PurePath(__file__).parent)


class Wait(NamedTuple):
    """A wait of the host: for what, and where."""

    thread: str
    what: str
    place: str  # file:line of hvdtrain, or of the script


class Exchange(NamedTuple):
    """A collective or a message of tensors in host memory, and where the host began it."""

    thread: str
    what: str  # "allreduce"
    place: str


class Recorder:
    """Counts since the last clear(). Any thread may add to it."""

    def __init__(self) -> None:
        self.waits: Counter[Wait] = Counter()
        self.devices: set[tuple[str, int]] = set()  # of a thread
        self.races: list[str] = []
        self.exchanges: Counter[Exchange] = Counter()
        self.is_watching = False

    def clear(self) -> None:
        self.waits.clear()
        self.devices.clear()
        self.races.clear()
        self.exchanges.clear()

    def add(self, kind: str, what: str) -> None:
        thread = threading.current_thread().name
        if kind == "wait" and self.is_watching:
            self.waits[Wait(thread, what, place())] += 1
        elif kind == "exchange":
            self.exchanges[Exchange(thread, what, place(ENGINE))] += 1
        elif kind == "touch":
            self.devices.add((thread, int(what)))
        elif kind == "race":
            text = f"{place()}, {thread}: {what}"
            if text not in self.races:
                self.races.append(text)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Counts waits inside."""
        self.is_watching = True
        try:
            yield
        finally:
            self.is_watching = False

    def waits_of(self, thread: str = "MainThread") -> dict[str, int]:
        """{"item() at comm/order.py:57": 3} of one thread."""
        return {
            f"{wait.what} at {wait.place}": count
            for wait, count in sorted(self.waits.items())
            if wait.thread == thread
        }

    def exchanges_of(self, thread: str = "MainThread") -> Counter[str]:
        """{"allreduce at comm/order.py:82": 3} of one thread."""
        found: Counter[str] = Counter()
        for each, count in list(self.exchanges.items()):
            if each.thread == thread:
                found[f"{each.what} at {each.place}"] += count
        return found


def place(without: tuple[str, ...] = ()) -> str:
    """file:line of the innermost frame of hvdtrain, but those of some files; else of the innermost
    that is not torch's."""
    frame = sys._getframe(1)
    other = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if f"/{PACKAGE}/" in path and not path.endswith(without):
            return f"{path.rpartition(f'/{PACKAGE}/')[2]}:{frame.f_lineno}"
        if not other and not path.startswith((HERE, "<")) and "site-packages" not in path:
            other = f"{PurePath(path).name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return other or "torch"
