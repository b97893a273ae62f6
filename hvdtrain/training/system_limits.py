"""An error of a process that has reached a limit of the system (ulimit, a container's), as one that tells which and what to do."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from hvdtrain.errors import MEMORY, UserError

_UNLIMITED = resource.RLIM_INFINITY
_LEAST_ADDRESSES = 2**28  # with fewer NumPy's OpenBLAS ends the process by itself, while it is loaded or at its first use
_NO_MEMORY = ("failed to map segment", "annot allocate memory", "cannot map")  # of the dynamic loader


def check_limits() -> None:
    """Before NumPy is imported. Raises UserError where `ulimit -v` leaves fewer addresses than any job needs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != _UNLIMITED and soft < _LEAST_ADDRESSES:
        raise _no_addresses_left()


def limit_reached(error: BaseException) -> UserError | None:
    """None for any other error."""
    for each in _chain(error):
        if isinstance(each, RuntimeError) and "can't start new thread" in str(each):
            return _no_threads()
        if isinstance(each, MemoryError) or (isinstance(each, ImportError) and any(text in str(each) for text in _NO_MEMORY)):
            return _no_addresses(each)
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and those during whose handling it came, the last first: a thread that has not begun cannot be joined, either."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__ or each.__context__


def _no_threads() -> UserError:
    limits = [*_limit("u", resource.RLIMIT_NPROC, 1, " (threads of this user)"), *_limit("v", resource.RLIMIT_AS, 1024, " kB")]
    limits += _limit("d", resource.RLIMIT_DATA, 1024, " kB")  # the stacks of threads count
    where = ", ".join(limits) or "the container's or the batch system's limit of processes (pids.max)"
    return UserError("the system gives this process no more threads", where, "raise the limit; or fewer: OMP_NUM_THREADS=1 data.readers=1")


def _no_addresses(error: BaseException) -> UserError | None:
    """None where `ulimit -v` does not limit them: then the memory itself is used up."""
    if not _limit("v", resource.RLIMIT_AS, 1024, ""):
        return None
    limit = _no_addresses_left()
    if isinstance(error, MemoryError):
        limit.code = MEMORY
    return limit


def _no_addresses_left() -> UserError:
    where = ", ".join(_limit("v", resource.RLIMIT_AS, 1024, " kB"))
    fix = "ulimit -v unlimited: libraries reserve far more addresses than they use memory"
    return UserError("this process may have no more addresses of memory", where, fix)


def _limit(option: str, which: int, unit: int, name: str) -> list[str]:
    """One text, none without a limit."""
    soft, _ = resource.getrlimit(which)
    return [] if soft == _UNLIMITED else [f"ulimit -{option} {soft // unit}{name}"]
