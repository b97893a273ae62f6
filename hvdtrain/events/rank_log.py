"""What a single rank logs: warnings with its number and host, and a log file of its own (log.per_rank)."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hvdtrain.errors import UserError

LOGGER = logging.getLogger("hvdtrain.rank")


@contextmanager
def tagged_warnings(rank: int, size: int) -> Iterator[None]:
    """Writes warnings of Python and of libraries to the standard error as `rank 3 on n1: ...`; unchanged in a job of one rank."""
    if size == 1:
        yield
        return
    to_stderr = logging.StreamHandler()
    to_stderr.setLevel(logging.WARNING)
    to_stderr.setFormatter(logging.Formatter(f"rank {rank} on {socket.gethostname()}: %(levelname)s: %(message)s"))
    with _capture_logging_and_warnings(to_stderr):
        yield


@contextmanager
def rank_log(path: Path | None) -> Iterator[None]:
    """Writes warnings, LOGGER.info() and the traceback of an exception that leaves the block to this file, line by line.

    None: no file. Raises UserError where the file cannot be opened.
    """
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        to_file = _RankFile(path, encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"cannot write the log file of a rank: {error}", "log.per_rank", "set run= to a folder that every rank can write"
        ) from None
    to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level, propagate = LOGGER.level, LOGGER.propagate
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
            to_file.close()


@contextmanager
def _capture_logging_and_warnings(handler: logging.Handler) -> Iterator[None]:
    """Sends records of the root logger and Python's warnings to a handler."""
    root = logging.getLogger()
    showwarning = warnings.showwarning
    root.addHandler(handler)
    logging.captureWarnings(True)
    captured_here = warnings.showwarning is not showwarning  # an outer block may capture them already
    try:
        yield
    finally:
        root.removeHandler(handler)
        if captured_here:
            logging.captureWarnings(False)


class _RankFile(logging.FileHandler):
    """Drops lines while the disk is full; the job goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
