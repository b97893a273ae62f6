"""Which trial comes next: the rest of a list that is known before the sweep starts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from hvdtrain.cli.sweep.trial import Result, Trial


class Proposals(Protocol):
    """Called by the sweep between its processes."""

    def following(self) -> Trial | None:
        """The next trial to start, one that was interrupted too; None where there is none left."""

    def ended(self, trial: Trial, result: Result) -> None:
        """A trial that `following` gave has ended."""

    @property
    def is_hopeless(self) -> Callable[[Trial], bool] | None:
        """Whether a trial that runs is to be stopped for its results so far; None: none ever is."""


class Listed:
    """Trials in their order, without those that are kept."""

    is_hopeless = None

    def __init__(self, trials: Sequence[Trial], kept: Collection[str]) -> None:
        self._left = [trial for trial in trials if trial.name not in kept]

    def following(self) -> Trial | None:
        return self._left.pop(0) if self._left else None

    def ended(self, trial: Trial, result: Result) -> None:
        """Nothing follows from it."""
