"""hvdtrain.run(): a script's loop as a function, which the surviving ranks call again when one is
lost (guard.lost=shrink)."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol, cast

from hvdtrain.context.context import Context
from hvdtrain.context.open_context import connected, the_open_one
from hvdtrain.context.open_run import Former
from hvdtrain.core.process import exit_now
from hvdtrain.errors import UserError
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.lost import Survival, survival_of
from hvdtrain.training.run_rank import ConnectedRank

WHERE = "hvdtrain.run()"


def run_loop(
    train: Callable[[Context], object], config_file: str | None, arguments: Sequence[str]
) -> int:
    """Calls train(ctx) with a context like hvdtrain.init()'s and returns the loop's exit code.
    Every rank calls it.

    With guard.lost=shrink, the surviving ranks call it again after a loss, with a new context.
    Raises, and ends all ranks, as hvdtrain.init() does.
    """
    if not callable(train):
        raise UserError(
            f"{train!r:.60} is not a function of a context",
            WHERE,
            "def train(ctx): the loop; hvdtrain.run(train, {...})",
        )
    rank, closing = connected(config_file, arguments, WHERE)
    runs = _Runs(train, rank, closing)
    try:
        with the_open_one(runs):
            return runs.until_the_end()
    except BaseException as error:
        runs.fail(error)
        raise


class LoopSurvival(Survival, Protocol):
    """How the remaining ranks of a custom loop continue after a loss."""

    def without_lost(
        self, rank: ConnectedRank, hosts: list[str], context: Context | None, former: Former | None
    ) -> Former:
        """Returns the state from which a loop continues. Each surviving rank calls it. hosts: by
        the launcher's rank numbers; context: None if the loss happened while it was created."""


class _Runs:
    """The calls of train() on this rank, from the first to the one that completes."""

    def __init__(
        self, train: Callable[[Context], object], rank: ConnectedRank, closing: contextlib.ExitStack
    ) -> None:
        self._train = train
        self._rank = rank
        self._closing = closing
        self._context: Context | None = None
        self._hosts: list[str] = []  # by the launcher's rank numbers

    def until_the_end(self) -> int:
        """Calls train() until it completes on the surviving ranks; returns the exit code. Every
        rank calls it."""
        found = survival_of(self._rank.config, self._rank.communicator, in_loop=True)
        survival = cast(LoopSurvival | None, found)
        ranks = None if survival is None else survival.ranks
        former: Former | None = None
        while True:
            context: Context | None = None
            try:
                context = self._context = Context(self._rank, self._closing, ranks, former)
                self._hosts = self._hosts or list(context.hosts)
                self._train(context)
                return context.close()
            except Exception as error:
                if (
                    survival is None
                    or not survival.ranks.is_loss(error)
                    or (context is None and former is None)
                ):
                    raise
                # the model of the step that failed, and its connections
                traceback.clear_frames(error.__traceback__)
            former = survival.without_lost(self._rank, self._hosts, context, former)

    def fail(self, error: BaseException) -> None:
        """Handles an error: with several ranks it is reported and all exit; with one it is left to
        the script. Raises as the context does."""
        try:
            if self._context is not None:
                self._context.fail(error)
            else:
                self._closing.__exit__(type(error), error, error.__traceback__)
        except RankFailed as failed:
            exit_now(failed.code)
        except BaseException as other:
            if other is not error:
                raise
