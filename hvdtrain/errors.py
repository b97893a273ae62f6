"""Errors that a user can fix, how messages show values and the nearest known name, and the exit
codes of every command."""

from __future__ import annotations

import errno
from collections.abc import Sequence

DONE = 0
BUG = 1
USER = 2
REQUEUE = 75  # EX_TEMPFAIL of <sysexits.h>
STALLED = 81  # no progress within guard.stall_s, or no start within guard.start_s
DIVERGED = 82
MEMORY = 83
LOST = 84  # if the launcher ends the job first, its code is seen instead: 128 + signal

MEANINGS = {  # as in --help and in docs/keys.md
    DONE: "done: last epoch or step, stop.time or target reached",
    BUG: "an unexpected error: traceback, rank and host on the standard error",
    USER: "an error that you can fix: the message says what, where and how",
    REQUEUE: "stopped by a signal or a time limit after a checkpoint: the same command with "
    "run=DIR resumes the job",
    STALLED: "no progress: a report names the ranks that are behind, and what each is doing",
    DIVERGED: "a loss or gradient is not finite, or ranks differ; the last checkpoint is good",
    MEMORY: "out of memory, on the host or on a device",
    LOST: "the connection to another rank broke",
}

ADVICE = {
    MEMORY: "out of memory: batch.micro=N bounds one forward pass (gradients accumulate); "
    "batch.evaluate=N one of evaluation",
    LOST: "the connection to another rank broke: look for the first error of another rank or "
    "host; the same command resumes the job",
}


MOST_LISTED = 24  # names in the list of a message


class UserError(Exception):
    """An error that the user can fix: `what` is wrong, `where` (key, file:line, path, rank), and
    how to `fix` it.

    Shown as three lines, without a traceback; the exit code is `code`.
    """

    code = USER

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class StateLost(UserError):
    """The loss of ranks has destroyed the state that the others need to continue; raised on every
    rank."""

    code = LOST


class Diverged(UserError):
    """A loss or gradient is not finite, or ranks differ; raised on every rank."""

    code = DIVERGED


def exit_code_of(error: BaseException) -> int:
    """Returns the exit code after an exception. Frameworks are not imported: their exceptions are
    recognized by name and message."""
    if isinstance(error, UserError):
        return error.code
    if _is_out_of_memory(error):
        return MEMORY
    return LOST if _is_lost_connection(error) else BUG


def _is_out_of_memory(error: BaseException) -> bool:
    return (
        getattr(error, "errno", None) == errno.ENOMEM
        or bool({"builtins.MemoryError", "torch.OutOfMemoryError"} & _class_names(error))
        or any(message in str(error) for message in _OUT_OF_MEMORY_MESSAGES)
    )


def _is_lost_connection(error: BaseException) -> bool:
    classes = _class_names(error)
    message = str(error)
    if {"mpi4py.MPI.Exception", "torch.distributed.DistError"} & classes:
        return True
    if "gloo/" in message and any(
        part in message for part in _GLOO_CONNECTION_MESSAGES
    ):  # Gloo raises RuntimeError
        return True
    return (
        "horovod.common.exceptions.HorovodInternalError" in classes and "ismatched" not in message
    )


def _class_names(error: BaseException) -> set[str]:
    """Returns module.Class of an exception and of its base classes."""
    return {f"{base.__module__}.{base.__qualname__}" for base in type(error).__mro__}


_OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "CUDA out of memory",
    "RESOURCE_EXHAUSTED",
    "CUDA_ERROR_OUT_OF_MEMORY",
)
_GLOO_CONNECTION_MESSAGES = (
    "Connection closed by peer",
    "Connection reset",
    "Broken pipe",
    "Timed out",
    "timed out",
)


def nearest(word: str, known: Sequence[str], listed: Sequence[str] | None = None) -> str:
    """The fix for a misspelt name: the nearest known one, or some of them. `listed`: what to list
    instead of all known ones."""
    close = closest(word, known)
    if close is not None:
        return f"did you mean {close}?"
    names = known if listed is None else listed
    more = f", and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"known: {', '.join(names[:MOST_LISTED])}{more}"


def closest(word: str, known: Sequence[str]) -> str | None:
    """The known name that a misspelt one resembles, ignoring case, or that ends with it: batch.size
    for `size`."""
    import difflib  # 5 ms, and only a message needs it

    by_plain = {name.lower(): name for name in reversed(known)}
    plain = word.lower()
    close = difflib.get_close_matches(plain, by_plain, n=1, cutoff=0.6)
    if close:
        return by_plain[close[0]]
    last = plain.rsplit(".", maxsplit=1)[-1]
    return next((name for name in known if name.lower().split(".")[-1] == last), None)


def short(value: object, most: int = 200) -> str:
    """A value for a message: at most `most` characters, with control characters escaped."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def first_line(error: Exception) -> str:
    """Returns the first line of an exception's message, or its class if there is none."""
    return short((str(error).splitlines() or [type(error).__name__])[0], 400)
