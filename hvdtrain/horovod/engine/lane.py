"""The queue of one process set, and the rounds in which its ranks agree on what to make."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.order import CommThread, Exchange
from hvdtrain.comm.signed import pack, unpack
from hvdtrain.errors import LOST, UserError, exit_code_of
from hvdtrain.horovod.engine.agree import (
    BLOCKED,
    JOINED,
    LEAVING,
    OVERDUE,
    Asked,
    Decision,
    NegotiationBlock,
    Standing,
    decide,
    outside_of_inference,
    ranks_text,
)
from hvdtrain.horovod.engine.errors import BadCall, HorovodInternalError, Mismatch, Missing, Stalled
from hvdtrain.horovod.engine.perform import Performer, Streams
from hvdtrain.horovod.engine.reduce import finish_inline, stand_in
from hvdtrain.horovod.engine.requests import Key, Request, Settings, Signature
from hvdtrain.horovod.engine.timeline import Timeline, now_us
from hvdtrain.horovod.engine.waiting import (
    ANNOUNCE_S,
    Callers,
    Waiting,
    lost_ranks,
    wait_for,
    wait_without_word,
)

IDLE_S = 0.005  # between two rounds in which nothing could be made
# between two looks of a thread whether another one, which makes the rounds, has made its request
LOOK_S = 0.001
_FIX_NAMES = "the same calls, with the same names, on every rank of the process set"


class Lane:
    """Requests of the ranks of one process set, of which this process is one.

    A request is seen by the other ranks once this rank waits for any of its requests, or enough of
    them are queued: what a round makes depends on the programs of the ranks alone, not on time.
    """

    def __init__(
        self,
        communicator: Communicator,
        exchange: Exchange,
        ranks: Sequence[int],
        settings: Settings,
        timeline: Timeline,
        callers: Callers,
        change: Callable[[Signature], Any],
        streams: Streams | None = None,
    ) -> None:
        """ranks: of the job, those of the communicator. callers: threads of this process. streams:
        of this set alone.

        change: makes or removes a process set that all ranks have agreed on.
        """
        self.ranks = list(ranks)
        self._settings = settings
        self._timeline = timeline
        self._callers = callers
        self._change = change
        self.communicator = communicator
        self._exchange = exchange
        self._streams = streams or Streams()
        self._performer = Performer(
            communicator, ranks, settings.fusion_bytes, timeline, self._streams
        )
        self._block = NegotiationBlock(len(self.ranks))
        self._queue: dict[Key, Request] = {}  # in the order of the program
        self._lock = threading.Lock()  # of the queue
        self._rounds = threading.Lock()  # held by the thread that makes rounds
        self._bucket = 0
        self._bucket_bytes = 0
        self._bucket_is_empty = True
        self._asked: list[Request] | None = None  # of a round that has begun
        self._begun_s = self._before_s = (
            0.0  # time.monotonic() where the last round began, and the one before
        )
        self._last_asked: list[Request] = []  # of the last one
        self.names_lost = True  # in the error where a connection breaks; which takes a moment
        self._own_flags = 0
        self._special = 0
        self._last_joined = -1
        self._joined_before = set[int]()
        self._all_joined = self._all_leaving = False
        self._ended_meanwhile: list[
            int
        ] = []  # ranks, where the others have joined: they will not join any more
        self._idle_since: float | None = None  # of rounds without progress
        self._missing: dict[Key, list[int]] = {}
        self._thread: CommThread | None = None
        self._is_queued = False  # start() was called, and its rounds have not begun
        self._wanted = False  # by another thread: rounds until nothing is asked for
        self._broken: BaseException | None = None
        self.has_left = False  # once every rank has

    def submit(self, request: Request) -> bool:
        """Queues a request; True where enough are queued. Raises BadCall where one of this name is
        under way."""
        if self._broken is not None:
            raise self._broken
        self._streams.ask(request)
        with self._lock:
            if request.key in self._queue:
                what = (
                    "Requested to allreduce, allgather, or broadcast a tensor with the same name "
                    "as another tensor that is currently "
                    "being processed."
                )
                raise BadCall(
                    what,
                    request.signature.where,
                    "another name, or synchronize() the first one before",
                )
            request.bucket = self._bucket
            self._queue[request.key] = request
            self._bucket_bytes += request.size_bytes
            self._bucket_is_empty = False
            if self._timeline.is_on:
                self._timeline.asked(request)
            return self._bucket_bytes >= self._settings.fusion_bytes

    def show(self) -> None:
        """The requests so far are seen by the other ranks from the next round on."""
        with self._lock:
            if not self._bucket_is_empty:
                self._bucket = self._bucket + 1
                self._bucket_bytes = 0
                self._bucket_is_empty = True

    def finish(self, request: Request) -> None:
        """Returns once it is done, by rounds of this thread or of another one. Raises Stalled where
        it is not done in time."""
        start = time.monotonic()
        self._callers.wait(self)
        try:
            while not request.done:
                if self._rounds.acquire(timeout=LOOK_S):
                    try:
                        if not request.done:
                            self._round()
                    finally:
                        self._rounds.release()
                    self._pause()
                self._check_patience(request, start)
        finally:
            self._callers.go_on()

    def result(self, request: Request) -> Any:
        """The result of a request that is done. On a GPU it is there for what the present streams
        of this thread are given from now on."""
        self._streams.receive(request)
        return request.result

    def step(self, request: Request) -> bool:
        """Whether it is done; makes what can be made without waiting for a rank that has not come.
        Raises Stalled as finish() does."""
        if not request.done and self._rounds.acquire(blocking=False):
            if request.polled_s is None:
                request.polled_s = time.monotonic()
            try:
                self._begin()
                if self._exchange.done() or self._has_waited(request.polled_s):
                    self._end()
            finally:
                self._rounds.release()
            self._pause()
            self._check_patience(request, request.polled_s)
        return request.done

    def start(self) -> None:
        """Begins rounds on a thread of this set, which go on while want() is True and something is
        asked for."""
        with self._lock:
            if self._is_queued:
                return
            self._is_queued = True
            if self._thread is None:
                self._thread = CommThread()
        self._thread.start(self._work)

    def want(self, wanted: bool) -> None:
        self._wanted = wanted

    def has_shown(self) -> bool:
        with self._lock:  # another thread may take requests out meanwhile
            return any(request.bucket < self._bucket for request in self._queue.values())

    def join(self) -> int:
        """Takes part in everything that the others ask for, until all have joined; returns the rank
        that came last."""
        self.show()
        with self._rounds:
            self._special |= JOINED
            self._all_joined = False
            try:
                while not self._all_joined:
                    self._round()
                    self._pause()
                    if self._ended_meanwhile:
                        raise Missing(
                            f"{ranks_text(self._ended_meanwhile)} ended without it",
                            "hvd.join()",
                            _FIX_NAMES,
                        )
            finally:
                self._special &= ~JOINED
                self._joined_before = set()
                self._idle_since = None
        return self._last_joined

    def leave(self) -> None:
        """Makes what is asked for until every rank leaves; they may come back, also after a round
        in which one gave up.

        It waits without end for a rank that still works alone.
        """
        self._wanted = False  # so that the thread of this set leaves the rounds to this one
        self.show()
        with self._rounds:
            self._special |= LEAVING
            self._all_leaving = False
            while not self._all_leaving:
                if isinstance(self._broken, Stalled):
                    self._come_together()
                with contextlib.suppress(Stalled):  # of another rank, which this one comes late for
                    self._round()
                self._pause()
            self._special &= ~LEAVING
            self._idle_since = None
        self.has_left = True

    def _come_together(self) -> None:
        """After a round in which a rank gave up: every rank has begun it, at the latest here, and
        none makes what it was for."""
        if self._asked is not None:
            wait_without_word(self._waiting([], Settings(end_s=None, warn_s=self._settings.warn_s)))
        self._asked = self._broken = self._idle_since = None
        self._missing = {}

    def close(self) -> None:
        """Ends its thread. After leave(): nothing is asked for any more."""
        self._broken = self._broken or HorovodInternalError("this process set was removed")
        if self._thread is not None:
            self._thread.stop()

    def _work(self) -> None:
        with self._rounds:
            self._is_queued = False
            while self.has_shown() and self._broken is None:
                self._round()
                if not self._wanted:
                    return
                self._pause()

    def _check_patience(self, request: Request, start: float) -> None:
        if request.done or not self._has_waited(start):
            return
        missing = self._missing.get(request.key, [])
        what = f"ranks {missing} did not ask for it within {self._settings.end_s:g} s"
        raise Stalled(what, request.signature.where, _FIX_NAMES)

    def _has_waited(self, start: float) -> bool:
        """Since time.monotonic() was `start`, as long as a rank waits for others."""
        return self._settings.end_s is not None and time.monotonic() - start > self._settings.end_s

    def _round(self) -> None:
        self._begin()
        self._end()

    @outside_of_inference
    def _begin(self) -> None:
        """Unless a round has begun."""
        if self._broken is not None:
            raise self._broken
        if self._asked is not None:
            return
        self._own_flags = 0
        if self._idle_since is not None:
            overdue = time.monotonic() - self._idle_since > self._settings.deadlock_s
            self._own_flags = BLOCKED * self._callers.all_wait(self) + OVERDUE * overdue
        with self._lock:  # after that: a thread that waits has shown what it asks for before
            asked = [request for request in self._queue.values() if request.bucket < self._bucket]
        try:
            self._block.fill(asked, self._special, self._own_flags)
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
    def _end(self) -> None:
        try:
            self._complete()
        except BaseException as error:
            broken = self._break(error)
            raise broken from (None if broken is error else error)

    def _complete(self) -> None:
        """Completes the round that has begun."""
        asked = self._asked
        assert asked is not None, "no round has begun"
        if not self._exchange.done() or time.monotonic() - self._before_s > ANNOUNCE_S:
            settings = (
                self._settings._replace(end_s=None) if self._special & LEAVING else self._settings
            )
            wait_for(self._waiting(asked, settings), self._before_s)
        self._asked = None
        if not self._block.is_equal():
            self._make_agreed(asked)
        elif not asked:
            self._note_progress(progress=False)
        elif self._block.has_tensors:
            self._make_inline(asked)
        else:
            self._make([(request, (request.bucket,) * len(self.ranks)) for request in asked])
        if asked and self._timeline.is_on:
            self._timeline.round_ends()

    def _waiting(self, asked: Sequence[Request], settings: Settings) -> Waiting:
        return Waiting(
            self._exchange,
            settings,
            self.ranks,
            self.communicator.rank,
            lambda: self._purpose(asked),
        )

    def _purpose(self, asked: Sequence[Request]) -> str:
        if not asked:
            if self._special & JOINED:
                return "join"
            if self._special & LEAVING:
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
        """Where ranks ask for different things: each tells all, and all decide the same."""
        standings = self._standings(asked)
        decision = decide(standings)
        own = {request.key: request for request in asked}
        self._missing = decision.missing
        ready = [
            (own.get(each.signature.key) or self._stand_in(each.signature), each.buckets)
            for each in decision.ready
        ]
        if ready:
            self._make(ready)
        self._refuse(decision, own)
        self._note_joined(standings)
        self._note_progress(progress=bool(decision.ready or decision.refused))

    def _stand_in(self, signature: Signature) -> Request:
        request = stand_in(signature, len(self.ranks))
        self._streams.ask(request)
        return request

    def _standings(self, asked: Sequence[Request]) -> list[Standing]:
        special = self._special
        own = self._own_flags
        rank = self.ranks[self.communicator.rank]
        listed = [Asked(request.signature, request.bucket) for request in asked]
        flags = (
            bool(special & JOINED),
            bool(special & LEAVING),
            bool(own & BLOCKED),
            bool(own & OVERDUE),
        )
        packed = np.frombuffer(pack(Standing(rank, listed, *flags), ""), np.uint8)
        lengths = self.communicator.allgather(np.array([len(packed)]), "standings")
        parts = np.split(self.communicator.allgather(packed, "standings"), np.cumsum(lengths)[:-1])
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

    def _refuse(self, decision: Decision, own: dict[Key, Request]) -> None:
        for key, refusal in decision.refused.items():
            if key in own:
                request = own[key]
                kind = Missing if refusal.of_missing else Mismatch
                if self._timeline.is_on:
                    self._timeline.negotiated([request])
                request.fail(error := kind(refusal.what, request.signature.where, _FIX_NAMES))
                if self._special & LEAVING:  # nobody will ask for its result
                    print(
                        f"hvdtrain.horovod: never synchronized: {error}",
                        file=sys.stderr,
                        flush=True,
                    )
                self._forget([request])

    def _forget(self, requests: Sequence[Request]) -> None:
        with self._lock:
            for request in requests:
                if self._queue.get(request.key) is request:
                    del self._queue[request.key]
        self._note_progress(progress=True)

    def _note_joined(self, standings: Sequence[Standing]) -> None:
        joined = {standing.rank for standing in standings if standing.joined}
        if new := joined - self._joined_before:
            self._last_joined = max(new)
        self._joined_before = joined
        self._all_joined = len(joined) == len(standings)
        self._all_leaving = all(standing.leaving for standing in standings)
        ended = [standing.rank for standing in standings if standing.leaving]
        self._ended_meanwhile = (
            ended if all(standing.leaving or standing.joined for standing in standings) else []
        )

    def _note_progress(self, *, progress: bool) -> None:
        if progress:
            self._idle_since = None
            return
        if self._idle_since is None:
            self._idle_since = time.monotonic()

    def _pause(self) -> None:
        """After a round in which nothing could be made. Not within the rounds' lock where another
        thread may be waiting for it."""
        if self._idle_since is not None:
            time.sleep(IDLE_S)

    def _break(self, error: BaseException) -> BaseException:
        """No round is possible any more: what is asked for fails, and so does every later call.
        Returns what this one raises."""
        broken = error
        if not isinstance(error, (UserError, HorovodInternalError)):
            broken = self._named(error)
            broken.__cause__ = error
        self._broken = broken
        with self._lock:
            for request in self._queue.values():
                request.fail(broken)
            self._queue.clear()
        return broken if isinstance(error, Exception) else error

    def _named(self, error: BaseException) -> HorovodInternalError:
        """An error of a collective: with the ranks that are lost, and the call, where a connection
        broke."""
        text = f"{type(error).__name__}: {error}"
        if (
            exit_code_of(error) != LOST
            or "plain_mpi" in self.communicator.features
            or not self.names_lost
        ):
            return HorovodInternalError(text)
        lost = lost_ranks(self._exchange, self.ranks, self.communicator.rank)
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
