"""Catches the loss of a rank, in one place: the surviving ranks continue as a smaller job, and one
of them writes the run folder."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from hvdtrain.comm.communicator import Communicator, Elastic
from hvdtrain.comm.on_all_ranks import on_rank_0, on_rank_0_only
from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.core.progress import GoOn
from hvdtrain.errors import LOST, StateLost, UserError
from hvdtrain.events.log import Event, Sink
from hvdtrain.extras.elastic.memory_copy import MemoryCopy, RolledBack
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.room import cannot_write
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.health.watchdog import Watchdog
from hvdtrain.training.job import Job, on_other_ranks
from hvdtrain.training.lost import RankFailure, RunningJob, tell_loss
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.run_lock import RunLock


class ElasticJob(RunningJob):
    """The job of this rank, which changes when ranks are lost."""

    def __init__(
        self,
        job: Job,
        ranks: Elastic,
        successor: Successor,
        watchdog: Watchdog | None,
        now: TrainState,
    ) -> None:
        """ranks: from ready_for_losses(). Every rank calls it, in the state `now`."""
        super().__init__(job)
        self._ranks = ranks
        self._successor = successor
        self._watchdog = watchdog
        self._hosts = list(job.hosts)  # by the launcher's rank numbers
        self._total = now.progress.total
        self._copy = job.memory_copy = MemoryCopy(job.learner, ranks, now)
        successor.share_lock(job.communicator)

    def outlives(self, error: Exception) -> bool:
        if not self._ranks.is_loss(error):
            return False
        # collectives of the step that failed: their connections stay open with them
        traceback.clear_frames(error.__traceback__)
        return True

    def go_on(self) -> TrainState:
        ranks = self._ranks
        began_s = time.perf_counter()
        job = self.job
        lost = list[int]()
        step = job.heartbeat.step
        former_rank = ranks.rank
        while True:
            try:
                job.heartbeat.beat("continuing without lost ranks", job.heartbeat.epoch, step)
                lost += ranks.shrink()
                detect_s = time.perf_counter() - began_s
                how = self._how_to_go_on(former_rank)
                now, from_checkpoint = self._restore(ranks, how)
                steps = job.communicator.allgather_object(step)
                ranks.confirm()
                break
            except Exception as error:
                if not ranks.is_loss(error):
                    raise
        if how:
            job.learner.go_on(how, now.progress.step)
        else:
            self.job.unfinished = None
        go_on_s = time.perf_counter() - began_s
        hosts = [self._hosts[rank] for rank in lost]
        source = how.source if how else "checkpoint" if from_checkpoint else "memory"
        loss = RankFailure(
            lost,
            hosts,
            how.version if how else max(steps),
            detect_s,
            go_on_s,
            source,
            how.given_again if how else None,
        )
        self._tell(loss, now)
        return now

    def _how_to_go_on(self, former_rank: int) -> GoOn | None:
        """Returns how the surviving ranks continue; None if all roll back to a sync point. A
        collective."""
        return self.job.learner.how_to_go_on(former_rank, self._copy.now.progress.step)

    def _restore(self, ranks: Elastic, how: GoOn | None) -> RolledBack:
        """Restores everything that depends on the set of ranks. A collective."""
        job = self.job
        if self._watchdog is not None:
            self._watchdog.attach(ranks)
        job.warnings.renumber(ranks.rank, ranks.size)
        job.prefetcher.discard()
        job.learner.stopwatch.read()
        job.checkpoints.give_up()
        restored = (
            RolledBack(self._copy.go_on(), False)
            if how
            else self._copy.restore(self._read_checkpoint)
        )
        on_rank_0_only(ranks, lambda: self._successor.take_over(job, restored.now))
        self._successor.share_lock(ranks)
        self.job = on_other_ranks(job, restored.now)
        job.hooks.load(restored.now)
        return restored

    def _read_checkpoint(self) -> TrainState:
        """Loads the newest checkpoint, if a rank was lost together with the rank that had the copy
        of its parts. A collective."""
        try:
            now = self.job.checkpoints.roll_back()
        except UserError as error:
            what = (
                "ranks are lost, and with them all copies of some parts of the training state; "
                f"{error.what}"
            )
            raise StateLost(
                what,
                error.where,
                "checkpoint.every_minutes=N or every_steps=N, in a folder that all hosts share",
            ) from None
        return dataclasses.replace(
            now, progress=dataclasses.replace(now.progress, total=self._total)
        )

    def _tell(self, loss: RankFailure, now: TrainState) -> None:
        job = self.job
        p = now.progress
        step = loss.step if loss.goes_on else p.step  # the step from which training continues
        left = job.communicator.size
        then = f"{left} continue"
        reasons = (each.why_over(loss.ranks, left) for each in job.config.sections)
        why = next(filter(None, reasons), "")
        if job.config.guard.lost == "restart" or why:
            why = why or "guard.lost=restart"
            then = f"the job ends, to be started again ({why})"
            job.health.stop_request = f"{loss.who()} lost"
            job.health.stop_code = LOST
        tell_loss(
            job.log,
            loss,
            now,
            step,
            left,
            f"{then} from step {step}{_what_was_lost(loss)}",
        )


def _what_was_lost(loss: RankFailure) -> str:
    """Returns what was lost, for the event's line."""
    if loss.restored_from == "checkpoint":
        return ", the newest checkpoint: the copies of some parts are lost"
    if loss.given_again:
        return f", ticket {', '.join(map(str, loss.given_again))} is given to another worker"
    return ""


_TAIL_BYTES = 2**18  # bytes of events.jsonl, enough for the events of the last sync points


class Successor:
    """Everything that a rank needs to take over as rank 0; kept on every rank."""

    def __init__(
        self,
        config: Config,
        run: Path,
        lock: RunLock,
        open_sinks: Callable[[], list[Sink]],
        make_saver: Callable[[TrainState], Saver],
    ) -> None:
        self._config = config
        self._run = run
        self._lock = lock
        self._open_sinks = open_sinks
        self._make_saver = make_saver
        self._token = ""  # token of the current writer's lock

    def share_lock(self, communicator: Communicator) -> None:
        """Broadcasts the token of the lock that a rank may take over. A collective."""
        self._token = on_rank_0(communicator, lambda: self._lock.token)

    def take_over(self, job: Job, now: TrainState) -> None:
        """Takes over the run folder, on rank 0. Raises UserError if this rank cannot write it."""
        if job.checkpoints.saver is not None:
            return
        try:
            self._lock.take_over(self._run, self._token)
            files.remove_leftovers(self._run)
            written = _last_events(self._run)
        except OSError as error:
            raise cannot_write(error, self._config.where("run")) from None
        record, *others = self._open_sinks()
        job.log.open(
            record,
            others,
            lambda event: event.step <= now.progress.step and _key(event) not in written,
        )
        job.checkpoints.saver = self._make_saver(now)


def _key(event: Event) -> tuple[str, int]:
    return event.kind, event.step


def _last_events(run: Path) -> set[tuple[str, int]]:
    """Returns kind and step of the last events in the file. Raises OSError."""
    kinds_and_steps = set()
    with Folder.open(run) as folder, folder.open_file("events.jsonl") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError):
                event = json.loads(line)
                kinds_and_steps.add((event["kind"], event["step"]))
    return kinds_and_steps
