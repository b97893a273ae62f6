"""A small block of every rank on all ranks, without waiting: how ranks find out what the others are about to do, and who does not come."""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Exchange(Protocol):
    """Gathers, one after another: each rank starts the next one once the last is done."""

    threads: bool  # whether threads of a process may use their communicators at the same time

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        """block: of the same length and dtype on every rank, unchanged until done(); rows: takes the blocks in rank order."""

    def done(self) -> bool:
        """Whether every rank has started it. Raises what a collective raises where a rank is lost."""

    def announce(self) -> None:
        """Tells the other ranks that this one is in the exchange that it has started last."""

    def present(self) -> set[int]:
        """The ranks that have announced themselves in this exchange."""

    def free(self) -> None:
        """Every rank calls it once, last, when no exchange is under way. A collective."""
