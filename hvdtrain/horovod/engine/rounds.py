"""The rounds in which the ranks of a process set agree on requests and run them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.order import OrderedExchange
from hvdtrain.comm.signed import pack, unpack
from hvdtrain.errors import LOST, UserError, exit_code_of
from hvdtrain.horovod.engine.agree import (
    BLOCKED,
    JOINED,
    LEAVING,
    OVERDUE,
    Asked,
    NegotiationBlock,
    NegotiationResult,
    Standing,
    decide,
    outside_of_inference,
    ranks_text,
)
from hvdtrain.horovod.engine.errors import HorovodInternalError, Mismatch, Missing
from hvdtrain.horovod.engine.perform import Performer, Streams
from hvdtrain.horovod.engine.reduce import finish_inline, stand_in
from hvdtrain.horovod.engine.request_queue import RequestQueue
from hvdtrain.horovod.engine.requests import Key, Request, Signature
from hvdtrain.horovod.engine.settings import Settings
from hvdtrain.horovod.engine.timeline import Timeline, now_us
from hvdtrain.horovod.engine.waiting import (
    ANNOUNCE_S,
    ExchangeWait,
    lost_ranks,
    wait_for,
    wait_without_word,
)

FIX_NAMES = "the same calls, with the same names, on every rank of the process set"


class Attendance:
    """Which ranks of a process set have joined, and which leave, as they said in the last round."""

    def __init__(self) -> None:
        self.own = 0  # flags of this rank: JOINED, LEAVING
        self.last_joined = -1
        self.all_joined = self.all_leaving = False
        # ranks that ended while others had joined; they will never join
        self.ended_meanwhile: list[int] = []
        self._joined_before = set[int]()

    def join(self) -> None:
        self.own |= JOINED
        self.all_joined = False

    def end_join(self) -> None:
        self.own &= ~JOINED
        self._joined_before = set()

    def leave(self) -> None:
        self.own |= LEAVING
        self.all_leaving = False

    def end_leave(self) -> None:
        self.own &= ~LEAVING

    def note(self, standings: Sequence[Standing]) -> None:
        joined = {standing.rank for standing in standings if standing.joined}
        if new := joined - self._joined_before:
            self.last_joined = max(new)
        self._joined_before = joined
        self.all_joined = len(joined) == len(standings)
        self.all_leaving = all(standing.leaving for standing in standings)
        ended = [standing.rank for standing in standings if standing.leaving]
        self.ended_meanwhile = (
            ended if all(standing.leaving or standing.joined for standing in standings) else []
        )


class Rounds:
    """Consecutive rounds of one process set. One thread at a time may use them.

    After a failed round, no further round is possible.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchange: OrderedExchange,
        ranks: Sequence[int],
        settings: Settings,
        timeline: Timeline,
        queue: RequestQueue,
        streams: Streams,
        change: Callable[[Signature], Any],
        all_wait: Callable[[], bool],
    ) -> None:
        """ranks: the communicator's, numbered in the job. all_wait: whether every thread of this
        process that may make requests waits for these rounds.

        change: makes or removes a process set that all ranks have agreed on.
        """
        self.ranks = list(ranks)
        self._settings = settings
        self._timeline = timeline
        self._queue = queue
        self._change = change
        self._all_wait = all_wait
        self._communicator = communicator
        self._exchange = exchange
        self._streams = streams
        self._performer = Performer(communicator, ranks, settings.fusion_bytes, timeline, streams)
        self._block = NegotiationBlock(len(self.ranks))
        self._asked: list[Request] | None = None  # requests of a round that has begun
        # time.monotonic() at the beginning of the last round and the previous one
        self._begun_s = self._before_s = 0.0
        self._last_asked: list[Request] = []  # requests of the last round
        # whether to name dead ranks in the error for a broken connection, which takes a moment
        self.names_lost = True
        self.attendance = Attendance()
        self._own_flags = 0
        self._idle_since: float | None = None  # beginning of the rounds without progress
        # the ranks that have not made a request of this rank yet
        self.missing: dict[Key, list[int]] = {}
        self.broken: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether the last round made no progress."""
        return self._idle_since is not None

    def others_have_come(self) -> bool:
        """Whether end() does not have to wait for a rank."""
        return self._exchange.done()

    def make(self) -> None:
        """Runs a round."""
        self.begin()
        self.end()

    @outside_of_inference
    def begin(self) -> None:
        """Unless a round has begun."""
        if self.broken is not None:
            raise self.broken
        if self._asked is not None:
            return
        self._own_flags = 0
        if self._idle_since is not None:
            overdue = time.monotonic() - self._idle_since > self._settings.deadlock_s
            self._own_flags = BLOCKED * self._all_wait() + OVERDUE * overdue
        # after that, because a waiting thread has shown its requests before
        asked = self._queue.shown()
        try:
            self._block.fill(asked, self.attendance.own, self._own_flags)
        except Exception as error:
            broken = self._break(error)
            raise broken from (None if broken is error else error)
        if asked and self._timeline.is_on:
            self._timeline.round_begins()
        self._last_asked = asked
        self._before_s = self._begun_s
        self._begun_s = time.monotonic()
        try:
            self._exchange.start(self._block.own, self._block.rows)
        except Exception as error:
            broken = self._break(error)
            raise broken from (None if broken is error else error)
        self._asked = asked

    @outside_of_inference
    def end(self) -> None:
        """Completes the round that has begun."""
        try:
            self._complete()
        except BaseException as error:
            broken = self._break(error)
            raise broken from (None if broken is error else error)

    def come_together(self) -> None:
        """Called after a round in which a rank gave up. Here, at the latest, every rank has begun
        the round, and no rank runs its requests."""
        if self._asked is not None:
            wait_without_word(self._waiting([], Settings(end_s=None, warn_s=self._settings.warn_s)))
        self._asked = self.broken = self._idle_since = None
        self.missing = {}

    def note_progress(self, *, progress: bool) -> None:
        if progress:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = time.monotonic()

    def _complete(self) -> None:
        asked = self._asked
        assert asked is not None, "no round has begun"
        if not self._exchange.done() or time.monotonic() - self._before_s > ANNOUNCE_S:
            settings = (
                self._settings._replace(end_s=None)
                if self.attendance.own & LEAVING
                else self._settings
            )
            wait_for(self._waiting(asked, settings), self._before_s)
        self._asked = None
        if not self._block.is_equal():
            self._make_agreed(asked)
        elif not asked:
            self.note_progress(progress=False)
        elif self._block.has_tensors:
            self._make_inline(asked)
        else:
            self._make([(request, (request.bucket,) * len(self.ranks)) for request in asked])
        if asked and self._timeline.is_on:
            self._timeline.round_ends()

    def _waiting(self, asked: Sequence[Request], settings: Settings) -> ExchangeWait:
        return ExchangeWait(
            self._exchange,
            settings,
            self.ranks,
            self._communicator.rank,
            lambda: self._purpose(asked),
        )

    def _purpose(self, asked: Sequence[Request]) -> str:
        if not asked:
            if self.attendance.own & JOINED:
                return "join"
            if self.attendance.own & LEAVING:
                return "shutdown"
            return "a round"
        more = f" and {len(asked) - 1} more" if len(asked) > 1 else ""
        return f"{asked[0].signature.where}{more}"

    def _make_inline(self, asked: Sequence[Request]) -> None:
        timeline = self._timeline
        if timeline.is_on:
            timeline.negotiated(asked)
            begun = now_us()
            finish_inline(self._block, asked, self.ranks)
            timeline.came_inline(asked, begun)
        else:
            finish_inline(self._block, asked, self.ranks)
        self._forget(asked)

    def _make_agreed(self, asked: Sequence[Request]) -> None:
        """Handles different requests on ranks: each broadcasts its requests, and all make the same
        decision."""
        standings = self._standings(asked)
        decision = decide(standings)
        own = {request.key: request for request in asked}
        self.missing = decision.missing
        ready = [
            (own.get(each.signature.key) or self._stand_in(each.signature), each.buckets)
            for each in decision.ready
        ]
        if ready:
            self._make(ready)
        self._refuse(decision, own)
        self.attendance.note(standings)
        self.note_progress(progress=bool(decision.ready or decision.refused))

    def _stand_in(self, signature: Signature) -> Request:
        request = stand_in(signature, len(self.ranks))
        self._streams.ask(request)
        return request

    def _standings(self, asked: Sequence[Request]) -> list[Standing]:
        special = self.attendance.own
        own = self._own_flags
        rank = self.ranks[self._communicator.rank]
        listed = [Asked(request.signature, request.bucket) for request in asked]
        flags = (
            bool(special & JOINED),
            bool(special & LEAVING),
            bool(own & BLOCKED),
            bool(own & OVERDUE),
        )
        packed = np.frombuffer(pack(Standing(rank, listed, *flags), ""), np.uint8)
        lengths = self._communicator.allgather(np.array([len(packed)]), "standings")
        parts = np.split(self._communicator.allgather(packed, "standings"), np.cumsum(lengths)[:-1])
        return [unpack(part.tobytes(), "") for part in parts]

    def _make(self, requests: Sequence[tuple[Request, tuple[int, ...]]]) -> None:
        if self._timeline.is_on:
            self._timeline.negotiated([request for request, _ in requests])
        self._performer.perform([pair for pair in requests if pair[0].inputs])
        for request, _ in requests:
            if request.inputs:
                continue
            kind = request.signature.kind
            request.finish(
                self._change(request.signature)
                if kind in ("add_process_set", "remove_process_set")
                else []
            )
        self._forget([request for request, _ in requests])

    def _refuse(self, decision: NegotiationResult, own: dict[Key, Request]) -> None:
        for key, refusal in decision.refused.items():
            if key in own:
                request = own[key]
                kind = Missing if refusal.of_missing else Mismatch
                if self._timeline.is_on:
                    self._timeline.negotiated([request])
                request.fail(error := kind(refusal.what, request.signature.where, FIX_NAMES))
                if self.attendance.own & LEAVING:  # no one will read its result
                    print(
                        f"hvdtrain.horovod: never synchronized: {error}",
                        file=sys.stderr,
                        flush=True,
                    )
                self._forget([request])

    def _forget(self, requests: Sequence[Request]) -> None:
        self._queue.remove(requests)
        self.note_progress(progress=True)

    def _break(self, error: BaseException) -> BaseException:
        """Makes all pending and later requests fail, because no further round is possible. Returns
        the error that this call raises."""
        broken = error
        if not isinstance(error, (UserError, HorovodInternalError)):
            broken = self._named(error)
            broken.__cause__ = error
        self.broken = broken
        self._queue.fail_all(broken)
        return broken if isinstance(error, Exception) else error

    def _named(self, error: BaseException) -> HorovodInternalError:
        """Returns an error of a collective; if a connection broke, with the dead ranks and the
        call."""
        text = f"{type(error).__name__}: {error}"
        if (
            exit_code_of(error) != LOST
            or "plain_mpi" in self._communicator.features
            or not self.names_lost
        ):
            return HorovodInternalError(text)
        lost = lost_ranks(self._exchange, self.ranks, self._communicator.rank)
        what = (
            f"{ranks_text(lost)} is lost"
            if len(lost) == 1
            else f"one of {ranks_text(lost)} is lost"
        )
        return Missing(
            f"{what}: {text}",
            self._purpose(self._last_asked),
            "look for the first error of that rank or its host",
        )
