"""A small block of every rank on all ranks, without waiting: how ranks find out what the others are about to do, and who does not come."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import numpy as np

Word = Literal["here", "taken", "given up"]  # of a rank about an exchange: it waits there; it has taken the result; it never will
WORDS: tuple[Word, ...] = get_args(Word)


class Exchange(Protocol):
    """Gathers, one after another: each rank starts the next one once the last is done."""

    threads: bool  # whether threads of a process may use their communicators at the same time

    def start(self, block: np.ndarray, rows: np.ndarray) -> None:
        """block: of the same length and dtype on every rank, unchanged until done(); rows: takes the blocks in rank order."""

    def done(self) -> bool:
        """Whether every rank has started it. Raises what a collective raises where a rank is lost."""

    def say(self, word: Word) -> None:
        """Tells the other ranks, of the exchange that this one has started last. They need not be in it."""

    def said(self) -> dict[Word, set[int]]:
        """The ranks that have said each word of this exchange."""

    def free(self) -> None:
        """Every rank calls it once, last, when no exchange is under way. A collective."""
