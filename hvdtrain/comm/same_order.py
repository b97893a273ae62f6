"""What ranks are about to do, compared before they do it: collectives of different layers would be mixed in silence, or never end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator, Handle
from hvdtrain.comm.mesh import ranks_summary
from hvdtrain.errors import UserError


class Question(NamedTuple):
    """A comparison that is under way."""

    doing: str
    handle: Handle


class SameOrder:
    """The ranks of `ranks` call ask() before each collective of a layer, and end() where a pass or a step ends.

    So a rank whose collectives are others, or fewer, finds a question of the others in the place of its own. A question is an allreduce
    of 16 bytes. With `lags` its answer is read before the next collective: for engines whose collectives the host does not wait for.
    """

    def __init__(self, ranks: Communicator, rank: int, where: str, fix: str, *, lags: bool = False) -> None:
        """rank: of the job; where, fix: of the error."""
        self._ranks, self._rank, self._where, self._fix, self._lags = ranks, rank, where, fix, lags
        self._asked: Question | None = None
        self._waiting = ""  # in ask()
        self.at = ""  # what this rank does between questions, for people: "forward pass of blocks.3"

    @property
    def doing(self) -> str:
        """From any thread; empty between steps."""
        return self._waiting or self.at

    def ask(self, doing: str) -> None:
        """Raises UserError on every rank where another one is not `doing` the same."""
        if self._ranks.size == 1:
            return
        self._answer()
        self._waiting, code = doing, _code(doing)
        if self._lags:
            self._asked = Question(doing, self._ranks.start_allreduce(np.array([code, -code]), "order", "max"))
        else:
            self._compare(doing, self._ranks.allreduce(np.array([code, -code]), "order", "max"))
        self._waiting = ""

    def end(self, doing: str) -> None:
        """Asks as ask() does where no collective follows: the answer is there when it returns."""
        self.ask(doing)
        self._answer()
        self.at = ""

    def _answer(self) -> None:
        """Reads that of the last question."""
        if self._asked is not None:
            asked, self._asked = self._asked, None
            self._compare(asked.doing, asked.handle.wait())

    def _compare(self, doing: str, largest: np.ndarray) -> None:
        if largest[0] == -largest[1]:
            return
        ranks_of: dict[str, list[int]] = {}
        for rank, theirs in self._ranks.allgather_object((self._rank, doing)):
            ranks_of.setdefault(theirs, []).append(rank)
        each = "; ".join(f"{ranks_summary(ranks)}: {theirs}" for theirs, ranks in ranks_of.items())
        raise UserError(f"ranks use different layers ({each})", self._where, self._fix)


def end_step(orders: Iterable[SameOrder]) -> None:
    for order in orders:
        order.end("end of the step")


def doing_in(orders: Iterable[SameOrder]) -> str:
    """ "forward pass of blocks.3", empty between passes"""
    return ", ".join(order.doing for order in orders if order.doing)


def _code(doing: str) -> int:
    """At least 0, less than 2^56. Without a cache, of which torch.compile would warn."""
    return int.from_bytes(hashlib.blake2b(doing.encode(), digest_size=7).digest(), "little")
