"""Errors that a user can mend, how messages show values and the nearest known name, and the exit codes of every command."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Sequence

DONE = 0  # the job reached its end, or the target
BUG = 1  # an unexpected exception: its traceback is printed once, with rank and host
USER = 2  # something the user can mend: configuration, data, launcher, installation
REQUEUE = 75  # stopped by a signal or by a time limit, with a checkpoint written: the same command goes on (EX_TEMPFAIL of sysexits.h)
STALLED = 81  # no progress within guard.stall_s, or no start within guard.start_s: the report names the ranks
DIVERGED = 82  # a loss or gradient that is not finite, or ranks that differ
MEMORY = 83  # out of memory, on the host or on a device
LOST = 84  # the connection to another rank broke; where the launcher ends the job first, its code is seen instead (128 + signal)

MEANINGS = {
    DONE: "done: the last epoch, max_steps, or the target",
    BUG: "an unexpected error: traceback, rank and host on the standard error",
    USER: "something to mend in what was given: what, where, and how to fix it",
    REQUEUE: "stopped by a signal or a time limit after a checkpoint: the same command, with run=DIR, goes on",
    STALLED: "no progress: a report names the ranks that are behind, and what each is doing",
    DIVERGED: "a loss or gradient that is not finite, or ranks that differ; the last checkpoint is good",
    MEMORY: "out of memory, on the host or on a device",
    LOST: "the connection to another rank broke",
}


class UserError(Exception):
    """A mistake outside hvdtrain: `what` is wrong, `where` (key, file:line, path, rank), and how to `fix` it.

    Shown as three short lines and exit code 2, never as a traceback.
    """

    code = USER

    def __init__(self, what: str, where: str = "", fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what, self.where, self.fix = what, where, fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


def nearest(word: str, known: Sequence[str]) -> str:
    """The fix for a misspelt name: the nearest known one, or all of them."""
    last = word.rsplit(".", maxsplit=1)[-1]
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6) or [name for name in known if name.split(".")[-1] == last]
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"


def short(value: object, most: int = 200) -> str:
    """A value as a message shows it: of at most so many characters, with control characters escaped."""
    text = value if isinstance(value, str) else repr(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def first_line(error: Exception) -> str:
    """The first line of an exception's message, or its class where it has none."""
    return short((str(error).splitlines() or [type(error).__name__])[0], 400)


class Diverged(UserError):
    """Numbers that cannot be trained with any more; the same on every rank."""

    code = DIVERGED


def code_of(error: BaseException) -> int:
    """The exit code of an unexpected exception, told by its class and words: no framework is imported to ask."""
    kinds = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    text = str(error)
    if (
        getattr(error, "errno", None) == errno.ENOMEM
        or "builtins.MemoryError" in kinds
        or "torch.OutOfMemoryError" in kinds
        or any(words in text for words in _NO_MEMORY)
    ):
        return MEMORY
    if {"mpi4py.MPI.Exception", "torch.distributed.DistError"} & kinds or ("gloo/" in text and any(words in text for words in _NO_PEER)):
        return LOST
    if "horovod.common.exceptions.HorovodInternalError" in kinds and "ismatched" not in text:
        return LOST
    return BUG


_NO_MEMORY = ("can't allocate memory", "CUDA out of memory", "RESOURCE_EXHAUSTED", "CUDA_ERROR_OUT_OF_MEMORY")
_NO_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out", "timed out")  # Gloo's are RuntimeErrors
ADVICE = {
    MEMORY: "out of memory: batch.micro=N bounds one forward pass (gradients accumulate); batch.evaluate=N one of evaluation",
    LOST: "the connection to another rank broke: look for the first error of another rank or host; the same command goes on",
}
