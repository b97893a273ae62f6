"""The lock of a run folder: acquired by rank 0 before it reads a checkpoint, kept alive by a
thread, checked at every event."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from hvdtrain.core.folder import Folder, WrongKind
from hvdtrain.errors import UserError
from hvdtrain.events.terminal import warn
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.health.signals import Signals
from hvdtrain.training.lock_holder import (
    GONE,
    LENGTH,
    UNWRITABLE,
    Holder,
    from_bytes,
    is_gone,
    lost_folder,
    this_process,
    to_bytes,
    unwritable_folder,
)

LOCK = "lock.json"
BEAT_S = 5.0  # between two signs of life
STALE_S = (
    60.0  # without a sign of life, until a process that is not visible from here counts as gone
)
WAIT_S = 300.0  # how long to wait for a job that writes its last checkpoint, and for signs of life
LOOK_S = 0.2  # between two checks of another job's lock
CLAIM_S = 3.0  # until a process that is removing a lock counts as gone
SAY_S = 30.0  # between two lines that report the wait
JOIN_S = 2.0  # how long to wait for a file system that hangs while the lock is refreshed


class Sign(NamedTuple):
    """The observed state of a lock's holder."""

    holder: Holder
    alive: bool | None  # None while unknown
    silent_s: float  # time without a change


class LockWatch:
    """Checks periodically whether a lock's holder lives: by its process if that is visible, else by
    its signs of life.

    No clocks of two hosts are compared: a sign of life is a change of the file.
    """

    def __init__(self, stale_s: float = STALE_S) -> None:
        self._stale_s = stale_s
        self._seen: Holder | None = None
        self._since_s = 0.0
        self._signs = 0

    def look(self, holder: Holder) -> Sign:
        now_s = time.monotonic()
        if self._seen is None or holder != self._seen:
            self._signs = (
                self._signs + 1
                if self._seen is not None and holder.token == self._seen.token
                else 0
            )
            self._seen = holder
            self._since_s = now_s
        silent_s = now_s - self._since_s
        gone = is_gone(holder)
        if gone is None and silent_s > self._stale_s:
            gone = True
        elif gone is None and self._signs:
            gone = False
        return Sign(holder, None if gone is None else not gone, silent_s)


class RunLock:
    """The lock of a run folder, as a context manager that releases it. Only rank 0 acquires it;
    without it all methods do nothing.

    start_s: guard.start_s, the time that the other ranks wait; stale_s: STALE_S.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        signals: Signals,
        start_s: float | None = None,
        stale_s: float = STALE_S,
    ) -> None:
        self._heartbeat = heartbeat
        self._signals = signals
        self._stale_s = stale_s
        self._wait_s = WAIT_S if start_s is None else min(WAIT_S, start_s / 2)
        self._folder: Folder | None = None  # open while the lock is held
        self._run = Path()
        self._mine = this_process()
        self._writing = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
        if self._thread is not None:
            # torch aborts if a thread frees the last reference to a tensor while the interpreter
            # exits
            self._thread.join(JOIN_S)

    def acquire(self, run: Path) -> list[str]:
        """Acquires the lock of an existing run folder; returns lines for the user. Raises OSError
        if the folder cannot be written.

        Raises UserError if a living job holds it. Waits for a job that writes its last checkpoint,
        and for a sign of life of a job that is not visible from here. A dead job loses its lock.
        """
        return self._acquire(run, "")

    def take_over(self, run: Path, token: str) -> None:
        """Acquires the lock after the loss of the rank that held the lock with this token."""
        self._acquire(run, token)

    @property
    def is_held(self) -> bool:
        """Whether this process holds the lock."""
        return self._folder is not None

    @property
    def token(self) -> str:
        """The token with which another rank may take the lock over."""
        return self._mine.token

    def _acquire(self, run: Path, gone: str) -> list[str]:
        folder = Folder.open(run)
        notes = list[str]()
        try:
            waiting = LockWait(run, self._wait_s, self._stale_s)
            while not self._create(folder):
                holder = read_holder(folder)
                if holder is not None and holder.token == gone:
                    remove_lock(folder, gone)
                    continue
                self._heartbeat.beat("waiting for the run folder", 0, 0)
                if (
                    holder is not None
                    and waiting.is_gone(holder)
                    and remove_lock(folder, holder.token)
                ):
                    notes.append(
                        "the lock of a job that ended without giving it back is taken over: "
                        f"{holder}"
                    )
        except BaseException:
            folder.close()
            raise
        self._folder = folder
        self._run = run
        self._thread = threading.Thread(target=self._stay_alive, name="run lock", daemon=True)
        self._thread.start()
        return notes

    def ending(self) -> None:
        """Records that the job writes its last checkpoint now: the next job may wait for it."""
        self._write(ending=True)

    def check(self) -> None:
        """Raises UserError if this job has lost its locked run folder: deleted, renamed, or taken
        by another job."""
        if self._folder is None:
            return
        try:
            with self._writing, Folder.open(self._run) as now:  # not while it is written
                holder = read_holder(now)
        except OSError as error:
            if error.errno in GONE or isinstance(error, WrongKind):
                raise lost_folder(self._run, self._folder) from None
            return  # such as no more open files: the next write will report it
        if holder is None or holder.token != self._mine.token:
            raise lost_folder(self._run, self._folder, holder)

    def open(self, run: Path) -> Folder:
        """Opens the run folder. If it is locked, opens the locked folder itself: another folder
        that later takes its path gets no files.

        Raises what check() raises, and OSError.
        """
        self.check()
        with self._writing:
            return self._folder.again() if self._folder else Folder.open(run)

    def refuse(self, error: OSError) -> None:
        """Called after a failed write into the run folder: raises UserError if the next one would
        fail, too."""
        if self._folder is not None and error.errno in (*GONE, *UNWRITABLE):
            self.check()
            raise unwritable_folder(self._run, error)

    def release(self) -> None:
        """Releases the lock; a second call does nothing. May be called from any thread."""
        self._over.set()
        with self._writing:
            folder = self._folder
            self._folder = None
        if folder is None:
            return
        with folder, contextlib.suppress(OSError):
            remove_lock(folder, self._mine.token)

    def _create(self, folder: Folder) -> bool:
        """Creates the lock file. Raises OSError if the folder cannot be written or the disk is
        full."""
        try:
            file = folder.create(LOCK)
        except FileExistsError:
            return False
        try:
            with file:
                file.write(to_bytes(self._mine))
                file.flush()
                os.fsync(file.fileno())
        except OSError:  # a full disk
            folder.remove(LOCK)
            raise
        return True

    def _stay_alive(self) -> None:
        """Refreshes the lock in its own thread: if a file system hangs, the watchdog must keep
        running."""
        written_s = time.monotonic()
        while not self._over.wait(1.0):
            ending = bool(self._signals.received) and not self._mine.ending
            if ending or time.monotonic() - written_s >= BEAT_S:
                self._write(ending=ending)
                written_s = time.monotonic()

    def _write(self, *, ending: bool) -> None:
        """Rewrites the lock file if it is still this process's; a file system that fails is
        detected at the next event."""
        with self._writing:
            if self._folder is None:
                return
            self._mine = self._mine._replace(
                beats=self._mine.beats + 1, ending=self._mine.ending or ending
            )
            with contextlib.suppress(OSError), self._folder.update(LOCK) as file:
                if (
                    from_bytes(file.read(LENGTH)).token == self._mine.token
                ):  # of this file; another job has a different file
                    file.seek(0)
                    file.write(to_bytes(self._mine))


class LockWait:
    """Decides for a job that finds another's lock whether it keeps waiting, takes the lock over, or
    is rejected."""

    def __init__(self, run: Path, wait_s: float, stale_s: float) -> None:
        self._run = run
        self._wait_s = wait_s
        self._stale_s = stale_s
        self._watch = LockWatch(stale_s)
        self._began_s = time.monotonic()
        self._said_s = -SAY_S

    def is_gone(self, holder: Holder) -> bool:
        """Whether the holder is gone; waits a moment if it may release the lock. Raises UserError
        if it will not."""
        sign = self._watch.look(holder)
        waited_s = time.monotonic() - self._began_s
        if sign.alive is False:
            return True
        if (sign.alive and not holder.ending) or waited_s > self._wait_s:
            raise in_use(self._run, sign)
        if waited_s - self._said_s >= SAY_S and waited_s > 2 * LOOK_S:
            self._said_s = waited_s
            why = (
                f"which ends: this job waits for its last checkpoint ({waited_s:.0f} of "
                f"{self._wait_s:.0f} s)"
            )
            if sign.alive is None:
                why = (
                    f"not seen from here: no sign of life for {sign.silent_s:.0f} s, after "
                    f"{self._stale_s:.0f} s it counts as gone"
                )
            warn(f"{self._run} belongs to {holder}, {why}")
        time.sleep(LOOK_S)
        return False


def find_holder(run: Path, look_s: float) -> Sign | None:
    """Returns the holder of a run folder; None if there is none. Takes look_s if the process is not
    visible from here and gives no sign of life.

    Raises OSError.
    """
    watch = LockWatch()
    end_s = time.monotonic() + look_s
    sign = None
    with Folder.open(run) as folder:
        while (holder := read_holder(folder)) is not None:
            sign = watch.look(holder)
            if sign.alive is not None or time.monotonic() > end_s:
                return sign
            time.sleep(LOOK_S)
    return None


def in_use(run: Path, sign: Sign) -> UserError:
    """Returns the error of a job that finds a living one in its run folder."""
    seen = "" if sign.alive else f", without a sign of life for {sign.silent_s:.0f} s"
    fix = (
        "wait for it or stop it; or give another run=; if no such job runs any more, remove "
        f"{run / LOCK}"
    )
    return UserError(f"{run} is in use by another job: {sign.holder}{seen}", str(run / LOCK), fix)


def read_holder(folder: Folder) -> Holder | None:
    """Reads the lock's holder; None if there is no lock. Raises OSError."""
    try:
        with folder.open_file(LOCK) as file:
            return from_bytes(file.read(LENGTH))
    except FileNotFoundError:
        return None


def remove_lock(folder: Folder, token: str) -> bool:
    """Removes the lock with this token, and no other; False if it does not exist, or if another
    process is removing it.

    Two processes that find a stale lock could each remove the other's new lock: only the one that
    creates a file with this token's name may remove the lock. Raises OSError.
    """
    claim = f".lock-{token}"
    try:
        folder.create(claim).close()
    except FileExistsError:
        _wait_for_claim(folder, claim)
        return False
    try:
        holder = read_holder(folder)
        if holder is None or holder.token != token:
            return False
        folder.remove(LOCK)
        return True
    finally:
        with contextlib.suppress(FileNotFoundError):
            folder.remove(claim)


def _wait_for_claim(folder: Folder, claim: str) -> None:
    """Waits for a claim, which lasts a millisecond unless its process dies. Then this claim, but no
    later one, is removed after CLAIM_S."""
    seen = None
    began_s = 0.0
    while (status := folder.status(claim)) is not None:
        if seen != (seen := (status.st_ino, status.st_ctime_ns)):
            began_s = time.monotonic()
        elif time.monotonic() - began_s > CLAIM_S:
            with contextlib.suppress(FileNotFoundError):
                folder.remove(claim)
        time.sleep(LOOK_S / 10)
