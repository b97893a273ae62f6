"""updates.bin of a run folder: the order of asynchronous updates, and the staleness of their
gradients."""

from __future__ import annotations

import struct
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.on_all_ranks import on_rank_0_only
from hvdtrain.config.schema import Config
from hvdtrain.core.folder import NO_LINKS, Folder, WrongKind
from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import MOST_STALE, WorkerUpdate
from hvdtrain.errors import UserError
from hvdtrain.events.log import Log
from hvdtrain.extras.servers.keys import ServersConfig
from hvdtrain.frameworks.learner import Learner, asked_threads, fair_threads
from hvdtrain.training.telemetry.gauge import Gauge

NAME = "updates.bin"
VERSION = 1
_MAGIC = b"hvdtrain"
# magic, version, servers, workers, threads of a rank, first update
_HEADER = struct.Struct("<8sIIIIQ")
# ahead: ticket - number of the update
_RECORD = np.dtype([("ahead", "<i4"), ("staleness", "<u2"), ("worker", "<u2")])
MOST_BYTES = 2**32
_MOST_THREADS = 2**16


class Header(NamedTuple):
    """The header of the log, which describes the job that wrote it."""

    servers: int
    workers: int
    threads: int  # threads on each rank, because floating-point sums depend on it
    first: int  # number of the first update in the log

    def to_bytes(self) -> bytes:
        return _HEADER.pack(_MAGIC, VERSION, self.servers, self.workers, self.threads, self.first)


class UpdateLog:
    """The log of updates, on rank 0. The position of update n follows from n, so a job that resumes
    from a checkpoint overwrites later ones."""

    def __init__(self, run: Path, header: Header) -> None:
        """Opens the log. header.first: the updates done so far; an existing log that reaches that
        update is continued."""
        self._run = run
        self._first = header.first
        self._next = header.first
        with Folder.open(run) as folder:
            former = read_header(folder) if folder.status(NAME) else None
            # a job may resume with other workers, which hold no state at a sync point
            alike = {
                "first": 0,
                "workers": 0,
            }
            goes_on = (
                former is not None
                and former._replace(**alike) == header._replace(**alike)
                and former.first <= header.first
            )
            if goes_on and former is not None:
                self._first = former.first
                goes_on = self._cut(folder, header.first)
            if not goes_on:
                self._first = header.first
                if former is not None and header.first:
                    _keep(folder, former, header)
                folder.replace(NAME, header.to_bytes())

    def cut(self, step: int) -> None:
        """Truncates the log so that update `step` comes next, after a return to a sync point.
        Raises UserError if writing fails."""
        try:
            with Folder.open(self._run) as folder:
                self._cut(folder, step)
        except OSError as error:
            raise _cannot_write(self._run, error) from None
        self._next = step

    def _cut(self, folder: Folder, step: int) -> bool:
        """Whether the file reaches up to there."""
        end = _HEADER.size + (step - self._first) * _RECORD.itemsize
        with folder.update(NAME) as file:
            is_there = file.seek(0, 2) >= end
            file.truncate(end)
        return is_there

    def append(self, updates: Sequence[WorkerUpdate]) -> None:
        """Appends updates. Raises UserError if writing fails."""
        records = np.empty(len(updates), _RECORD)
        for i, update in enumerate(updates):
            assert update.staleness <= MOST_STALE, update
            records[i] = (update.ticket - self._next - i, update.staleness, update.worker)
        try:
            with Folder.open(self._run) as folder, folder.append(NAME) as file:
                file.write(records.tobytes())
        except OSError as error:
            raise _cannot_write(self._run, error) from None
        self._next += len(updates)


def _keep(folder: Folder, former: Header, header: Header) -> None:
    """Renames the former log, which cannot describe how the job continues."""
    kept = f"updates-before-{header.first}.bin"
    folder.rename(NAME, kept)
    why = f"updates end before step {header.first}"
    if former.threads != header.threads:
        why = (
            f"each rank had {former.threads} threads, not {header.threads}: "
            f"OMP_NUM_THREADS={former.threads} would continue it"
        )
    elif former.servers != header.servers:
        why = f"there were {former.servers} servers, not {header.servers}"
    warnings.warn(
        f"{NAME} starts over at step {header.first}, and `replay` refuses it: {why}; the former "
        f"one is {kept}",
        stacklevel=2,
    )


def open_update_log(run: Path, header: Header) -> UpdateLog:
    """Opens the log of updates. Raises UserError if it cannot be written."""
    try:
        return UpdateLog(run, header)
    except WrongKind as error:
        raise UserError(f"{NAME} is {error.strerror}", str(run / NAME), NO_LINKS) from None
    except OSError as error:
        raise _cannot_write(run, error) from None


def _cannot_write(run: Path, error: OSError) -> UserError:
    return UserError(
        f"cannot write {NAME}: {error.strerror}", str(run), "make room; or servers.log=false"
    )


def read_header(folder: Folder) -> Header | None:
    """Returns the header, or None if the file is not a log of this version."""
    with folder.open_file(NAME) as file:
        found = file.read(_HEADER.size)
    if len(found) < _HEADER.size:
        return None
    magic, version, *fields = _HEADER.unpack(found)
    return Header(*fields) if (magic, version) == (_MAGIC, VERSION) else None


def read_updates(run: Path) -> tuple[Header, list[WorkerUpdate]]:
    """Reads the whole log. Raises UserError if it is missing, damaged or of another version."""
    where = str(run / NAME)
    try:
        with Folder.open(run) as folder:
            header = read_header(folder)
            data = folder.read(NAME, MOST_BYTES)
    except FileNotFoundError:
        raise UserError(
            "the run folder has no log of updates",
            where,
            "a run that was trained with servers.log=true",
        ) from None
    except WrongKind as error:
        raise UserError(f"{NAME} is {error.strerror}", where, NO_LINKS) from None
    except (OSError, ValueError) as error:
        raise UserError(
            f"cannot read {NAME}: {getattr(error, 'strerror', None) or error}",
            where,
            "a run folder that you may read",
        ) from None
    if header is None:
        raise UserError(
            f"{NAME} is not a log of version {VERSION}",
            where,
            "replay it with the hvdtrain that wrote it",
        )
    whole = (
        len(data) - _HEADER.size
    ) // _RECORD.itemsize  # a job that was killed may have written a part of the last one
    records = np.frombuffer(data, _RECORD, whole, _HEADER.size)
    updates = [
        WorkerUpdate(header.first + i + ahead, staleness, worker)
        for i, (ahead, staleness, worker) in enumerate(records.tolist())
    ]
    _check(header, updates, where)
    return header, updates


def _check(header: Header, updates: Sequence[WorkerUpdate], where: str) -> None:
    fix = "another copy of it, if there is one"
    if not (header.servers and header.workers and 0 < header.threads <= _MOST_THREADS):
        what = f"{header.servers} servers, {header.workers} workers, {header.threads} threads"
        raise UserError(f"{NAME} is damaged: it begins with {what}", where, fix)
    for number, update in enumerate(updates, header.first):
        if update.staleness > number or update.ticket < 0:
            what = f"update {number} has ticket {update.ticket} and staleness {update.staleness}"
            raise UserError(f"{NAME} is damaged: {what}", where, fix)


_MOST_BARS = 8  # bars in a line


def staleness_gauge(
    config: Config,
    communicator: Communicator,
    learner: Learner,
    log: Log,
    run: Path | None,
    step: int,
) -> StalenessGauge:
    """Creates the gauge, with a log of updates if servers.log is set and there is a run folder; the
    job continues with `step`. A collective."""
    updates = None
    servers = ServersConfig.of(config)
    if servers.log and run is not None:
        threads = asked_threads() or fair_threads(communicator)
        header = Header(servers.count, communicator.size - servers.count, threads, step)
        updates = on_rank_0_only(communicator, lambda: open_update_log(run, header))
    return StalenessGauge(learner.read_updates, updates)


class StalenessGauge(Gauge):
    """Counts staleness on rank 0; on other ranks there is nothing to count."""

    def __init__(
        self, read_updates: Callable[[], Sequence[WorkerUpdate]], log: UpdateLog | None = None
    ) -> None:
        """read_updates: returns the updates since the last call."""
        self._read_updates = read_updates
        self._log = log
        self._of_job: dict[int, Counter[int]] = {}  # worker -> staleness -> updates

    def from_step(self, step: int) -> StalenessGauge:
        """Returns itself; the updates from this step on are repeated."""
        if self._log:
            self._log.cut(step)
        return self

    def fields(self, sums: Sums, steps: int) -> dict[str, Any]:
        """Returns `staleness` of the updates since the last event; empty if no update is
        asynchronous."""
        updates = self._read_updates()
        if not updates:
            return {}
        if self._log:
            self._log.append(updates)
        found: dict[int, Counter[int]] = {}
        for update in updates:
            found.setdefault(update.worker, Counter())[update.staleness] += 1
        for worker, counts in found.items():
            self._of_job.setdefault(worker, Counter()).update(counts)
        return {
            "staleness": {
                str(worker): {str(age): n for age, n in sorted(found[worker].items())}
                for worker in sorted(found)
            }
        }

    def lines(self) -> list[str]:
        if not self._of_job:
            return []
        every: Counter[int] = sum(self._of_job.values(), Counter())
        lines = [
            f"servers  staleness of an update {mean(every):.2f}, at most {max(every)}: "
            f"{_bars(every)}"
        ]
        for worker, counts in sorted(self._of_job.items()):
            lines.append(
                f"         worker {worker}: {counts.total():,} updates, staleness "
                f"{mean(counts):.2f}, at most {max(counts)}"
            )
        return lines


def mean(counts: Counter[int]) -> float:
    return sum(age * n for age, n in counts.items()) / counts.total()


def _bars(counts: Counter[int]) -> str:
    """Formats the staleness: 0 in 12 %, 1 in 80 %, 2 in 8 %."""
    shown = [f"{age} in {counts[age] / counts.total():.0%}" for age in sorted(counts)[:_MOST_BARS]]
    return ", ".join(shown) + (", ..." if len(counts) > _MOST_BARS else "")
