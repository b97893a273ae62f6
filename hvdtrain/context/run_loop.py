"""hvdtrain.run(): a script's loop as a function, which the surviving ranks call again when one is
lost (guard.lost=shrink)."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Sequence

from hvdtrain.comm.communicator import Elastic
from hvdtrain.context.context import Context
from hvdtrain.context.open_context import connected, the_open_one
from hvdtrain.context.open_run import Former
from hvdtrain.core.process import exit_now
from hvdtrain.errors import UserError
from hvdtrain.training.failure import RankFailed
from hvdtrain.training.lost import RankFailure, ready_for_losses
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
        ranks = self._ready_for_losses()
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
                    ranks is None
                    or not ranks.is_loss(error)
                    or (context is None and former is None)
                ):
                    raise
                # the model of the step that failed, and its connections
                traceback.clear_frames(error.__traceback__)
            former = self._without_lost(ranks, context, former)

    def _ready_for_losses(self) -> Elastic | None:
        config = self._rank.config
        if config.guard.lost == "shrink" and config.run is None:
            what = "guard.lost=shrink resumes from checkpoints, but without run= there are none"
            raise UserError(what, config.where("guard.lost"), "run=DIR")
        return ready_for_losses(config, self._rank.communicator)

    def _without_lost(
        self, ranks: Elastic, context: Context | None, former: Former | None
    ) -> Former:
        """Returns the state from which surviving ranks continue. Each of them calls it. context:
        None if the loss happened while it was created."""
        began_s = time.perf_counter()
        heartbeat = self._rank.heartbeat
        lost = list[int]()
        step, untold = (
            (context.step, context.untold_loss)
            if context is not None
            else (0, former.loss if former else None)
        )
        if context is not None:
            context.give_up()
        while True:
            try:
                heartbeat.beat("continuing without lost ranks", heartbeat.epoch, step)
                lost += ranks.shrink()
                detect_s = time.perf_counter() - began_s
                self._rank.watchdog.attach(ranks)
                steps = ranks.allgather_object(step)
                ranks.confirm()
                break
            except Exception as error:
                if not ranks.is_loss(error):
                    raise
        self._rank.warnings.renumber(ranks.rank, ranks.size)
        if untold is not None:  # lost before the survivors had restarted
            lost, steps = [*untold.ranks, *lost], [*steps, untold.step]
        hosts = [self._hosts[rank] for rank in lost]
        # go_on_s is known later
        loss = RankFailure(lost, hosts, max(steps), detect_s, detect_s, "checkpoint", None)
        if context is not None:
            return context.former(loss, began_s)
        assert former is not None
        return former._replace(loss=loss)

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
