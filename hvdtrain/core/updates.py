"""Asynchronous updates of the weights: what each was made from, and what the loss of a rank leaves of those between two sync points."""

from __future__ import annotations

from typing import NamedTuple

MOST_STALE = 2**16 - 1  # that a record of the log of updates has bits for


class WorkerUpdate(NamedTuple):
    """One update of the weights from one worker's gradient."""

    ticket: int  # the step whose samples the gradient is of
    staleness: int  # updates between the worker's reading of the weights and this one
    worker: int  # its rank


class Outstanding(NamedTuple):
    """What a worker computes, or has computed, that no update is made from yet."""

    ticket: int
    read: int  # updates that its weights have


class GoOn(NamedTuple):
    """How the ranks that are left go on between two sync points, the same on all of them."""

    version: int  # updates done
    ranks: dict[int, int]  # the number that a rank had -> the one that it has
    sent_again: dict[int, Outstanding]  # by the new number of a worker: its whole gradient, which no update is made from yet
    given_again: list[int]  # tickets of which no worker that is left has the gradient
