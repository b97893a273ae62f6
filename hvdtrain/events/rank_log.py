"""The logs of a single rank: warnings with its number and host, and its own log file
(log.per_rank)."""

from __future__ import annotations

import contextlib
import io
import logging
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.core.folder import NO_LINKS, Folder, WrongKind
from hvdtrain.core.process import StderrWrite, print_stderr
from hvdtrain.errors import UserError

LOGGER = logging.getLogger("hvdtrain.rank")
PYTHON = "py.warnings"  # the logger to which logging.captureWarnings() sends them
MOST_WARNINGS = 1000  # distinct Python warnings that a rank shows


class ObjectBroadcast(Protocol):
    """The part of a communicator that exchange() uses."""

    def broadcast_object(self, thing: Any, /) -> Any: ...


class RankWarnings(logging.Handler):
    """Shows warnings of Python and of libraries on the standard error, as `rank 3 on n1: ...` in a
    job of several ranks.

    A Python warning is shown once: by rank 0 immediately, by another rank at the next exchange()
    unless rank 0 has shown it. If the reader has paused, training waits one second; warnings are
    dropped until it reads again.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(logging.WARNING)
        self._rank = rank
        self._size = size
        self._seen: set[str] = set()
        self._shown_by_rank_0: list[str] = []  # since the last exchange()
        self._held: list[logging.LogRecord] = []
        self._waiting: StderrWrite | None = None
        self._left_out = 0
        if size > 1:
            self.setFormatter(
                logging.Formatter(
                    f"rank {rank} on {socket.gethostname()}: %(levelname)s: %(message)s"
                )
            )

    def renumber(self, rank: int, size: int) -> None:
        """Renumbers after a loss of ranks. The formatter keeps the launcher's number."""
        self._rank = rank
        self._size = size

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.name != PYTHON:
            self._show(record)
        elif text not in self._seen and len(self._seen) < MOST_WARNINGS:
            self._seen.add(text)
            if self._rank:
                self._held.append(record)
            else:
                self._shown_by_rank_0.append(text)
                self._show(record)

    def exchange(self, communicator: ObjectBroadcast) -> None:
        """Exchanges warnings between ranks. Every rank calls it."""
        if self._size > 1:
            with self.lock or contextlib.nullcontext():
                shown = self._shown_by_rank_0
                self._shown_by_rank_0 = []
            self._show_held(communicator.broadcast_object(shown))

    def close(self) -> None:
        self._show_held([])
        super().close()

    def _show_held(self, known: list[str]) -> None:
        with self.lock or contextlib.nullcontext():
            self._seen.update(known)
            held = self._held
            self._held = []
            for record in held:
                if record.getMessage() not in known:
                    self._show(record)

    def _show(self, record: logging.LogRecord) -> None:
        if self._waiting is not None and self._waiting.is_alive():
            self._left_out += 1
            return
        text = self.format(record).rstrip()
        if self._left_out:
            text += (
                f"\n({self._left_out} warning{'s' if self._left_out > 1 else ''} left out before: "
                "nobody read this output)"
            )
            self._left_out = 0
        self._waiting = print_stderr(text, 1.0)


@contextmanager
def rank_warnings(rank: int, size: int, *, from_script: bool = False) -> Iterator[RankWarnings]:
    """Sends warnings of Python and libraries to the object while the block runs, except for a
    script on one rank."""
    if from_script and size == 1:
        yield RankWarnings()
        return
    to_stderr = RankWarnings(rank, size)
    try:
        with _capture_logging_and_warnings(to_stderr):
            yield to_stderr
    finally:
        to_stderr.close()


@contextmanager
def rank_log(path: Path | None) -> Iterator[None]:
    """Writes warnings, LOGGER.info() and the traceback of an exception that leaves the block to
    this file, RUN/ranks/NAME, line by line.

    None: no file. Raises UserError if the file cannot be opened.
    """
    if path is None:
        yield
        return
    try:
        with Folder.make(path.parent.parent, path.parent.name) as folder:
            to_file = _RankFile(
                io.TextIOWrapper(io.BufferedWriter(folder.append(path.name)), "utf-8")
            )
    except OSError as error:
        fix = (
            NO_LINKS
            if isinstance(error, WrongKind)
            else "set run= to a folder that every rank can write"
        )
        raise UserError(
            f"cannot write the log file of a rank: {path}: {error.strerror or error}",
            "log.per_rank",
            fix,
        ) from None
    to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level = LOGGER.level
    propagate = LOGGER.propagate
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    LOGGER.addHandler(to_file)
    try:
        with _capture_logging_and_warnings(to_file):
            yield
    except BaseException:
        LOGGER.info(traceback.format_exc().rstrip())
        raise
    finally:
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate
        LOGGER.removeHandler(to_file)
        with contextlib.suppress(OSError):  # on a full disk the last lines are lost
            to_file.stream.close()


@contextmanager
def _capture_logging_and_warnings(handler: logging.Handler) -> Iterator[None]:
    """Sends records of the root logger and Python's warnings to a handler."""
    root = logging.getLogger()
    showwarning = warnings.showwarning
    root.addHandler(handler)
    logging.captureWarnings(True)
    # an outer block may capture them already
    captured_here = warnings.showwarning is not showwarning
    try:
        yield
    finally:
        root.removeHandler(handler)
        if captured_here:
            logging.captureWarnings(False)


class _RankFile(logging.StreamHandler[io.TextIOWrapper]):
    """Drops lines while the disk is full; the job continues."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
