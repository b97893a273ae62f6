"""The rank that writes the run folder once the one that did so is lost: its lock, events and checkpoints."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.rank_0 import on_rank_0
from hvdtrain.config.schema import Config
from hvdtrain.core.folder import Folder
from hvdtrain.events.log import Event, Sink
from hvdtrain.training.checkpoint import files
from hvdtrain.training.checkpoint.room import cannot_write
from hvdtrain.training.checkpoint.saver import Saver
from hvdtrain.training.job import Job
from hvdtrain.training.progress.train_state import TrainState
from hvdtrain.training.run_lock.lock import RunLock
from hvdtrain.training.start import Start

_TAIL_BYTES = 2**18  # of events.jsonl, which have those of the last sync points


class Successor:
    """On every rank: what rank 0 needs if it was not rank 0 before."""

    def __init__(
        self, config: Config, start: Start, lock: RunLock, open_sinks: Callable[[], list[Sink]], make_saver: Callable[[TrainState], Saver]
    ) -> None:
        self._config, self._run, self._lock = config, start.run, lock
        self._open_sinks, self._make_saver = open_sinks, make_saver
        self._token = ""  # of the lock of the rank that writes now

    def share_lock(self, communicator: Communicator) -> None:
        """Tells every rank which lock it may take over. A collective."""
        self._token = on_rank_0(communicator, lambda: self._lock.token)

    def take_over(self, job: Job, now: TrainState) -> None:
        """On rank 0. Raises UserError where this rank cannot write the run folder."""
        if job.checkpoints.saver is not None:
            return
        try:
            self._lock.take_over(self._run, self._token)
            files.remove_leftovers(self._run)
            written = _last_events(self._run)
        except OSError as error:
            raise cannot_write(error, self._config.where("run")) from None
        record, *others = self._open_sinks()
        job.log.open(record, others, lambda event: event.step <= now.progress.step and _key(event) not in written)
        job.checkpoints.saver = self._make_saver(now)


def _key(event: Event) -> tuple[str, int]:
    return event.kind, event.step


def _last_events(run: Path) -> set[tuple[str, int]]:
    """Kind and step of those that are in the file. Raises OSError."""
    found = set()
    with Folder.open(run) as folder, folder.open_file("events.jsonl") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        for line in file.read().splitlines():
            with contextlib.suppress(ValueError, LookupError, TypeError):
                event = json.loads(line)
                found.add((event["kind"], event["step"]))
    return found
