"""What a rank says for itself: warnings with its number and host, and a log file of its own where that is asked for."""

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
    """Warnings of Python and of libraries go to the standard error as `rank 3 on n1: ...`; those of a job of one rank stay as they are."""
    if size == 1:
        yield
        return
    screen = logging.StreamHandler()
    screen.setLevel(logging.WARNING)
    screen.setFormatter(logging.Formatter(f"rank {rank} on {socket.gethostname()}: %(levelname)s: %(message)s"))
    with _handled(screen):
        yield


@contextmanager
def rank_log(path: Path | None) -> Iterator[None]:
    """Warnings, and what LOGGER.info() is told, go into this file, each line as it comes; an exception that passes by too."""
    if path is None:
        yield
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _File(path, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write this rank's log: {error}", "log.per_rank", "give run= a folder that every rank can write") from None
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    before = LOGGER.level, LOGGER.propagate
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False
    LOGGER.addHandler(file)
    try:
        with _handled(file):
            yield
    except BaseException:
        LOGGER.info(traceback.format_exc().rstrip())
        raise
    finally:
        LOGGER.setLevel(before[0])
        LOGGER.propagate = before[1]
        LOGGER.removeHandler(file)
        with contextlib.suppress(OSError):  # of a full disk
            file.close()


@contextmanager
def _handled(handler: logging.Handler) -> Iterator[None]:
    root, shown = logging.getLogger(), warnings.showwarning
    root.addHandler(handler)
    logging.captureWarnings(True)
    captured_here = warnings.showwarning is not shown
    try:
        yield
    finally:
        root.removeHandler(handler)
        if captured_here:
            logging.captureWarnings(False)


class _File(logging.FileHandler):
    """On a full disk lines are lost, and the job goes on."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)
