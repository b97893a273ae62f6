"""The engine that the calls of Horovod's API stand on, which takes requests of process sets, and its settings from Horovod's variables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

from hvdtrain.errors import UserError
from hvdtrain.horovod.engine.requests import Request

GLOBAL = 0  # id of the process set of all ranks
FUSION_BYTES = 4 << 20  # on processors more makes an allreduce slower: docs/performance.md


class Engine(Protocol):
    """Own: agreed on by the ranks, made by a communicator; or Horovod itself."""

    name: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    is_homogeneous: bool

    def submit(self, set_id: int, request: Request) -> int:
        """A handle. Raises BadCall where this rank is not in the set, or a request of this name is under way."""

    def poll(self, handle: int) -> bool:
        """Whether wait() would return at once."""

    def wait(self, handle: int) -> Any:
        """The result of a request, once for each handle. Raises the error of the request."""

    def join(self) -> int:
        """Takes part in what other ranks ask for until all have joined; returns the rank that came last."""

    def add_set(self, ranks: Sequence[int]) -> int:
        """The id of a new process set. Every rank of the job calls it. Raises BadCall where there is one of these ranks."""

    def remove_set(self, set_id: int) -> bool:
        """Whether there was one. Every rank of the job calls it."""

    def ranks_of(self, set_id: int) -> list[int]:
        """Raises BadCall where there is no such set."""

    def be_ready_to_shrink(self) -> None:
        """So that recover() can leave out ranks, where the engine can. A collective."""

    def confirm(self) -> None:
        """Before what was computed is kept: raises HorovodInternalError on every living rank where one was lost. A collective."""

    def recover(self, error: BaseException) -> None:
        """After an error on every living rank: leaves out those that are lost. Raises the error where no rank is lost, or it cannot."""

    def start_timeline(self, path: str, *, mark_cycles: bool) -> None:
        """Traces the requests from now on, on rank 0, or on every rank where the path has "{rank}"."""

    def stop_timeline(self) -> None:
        """The file is complete. Nothing where none is written."""

    def leave(self) -> None:
        """Ends what is under way, and every process set but that of all ranks, once every rank does."""

    def abort(self, code: int) -> NoReturn:
        """Ends every rank at once."""


class Settings(NamedTuple):
    """Horovod's environment variables that mean something here. Times in seconds; None: never."""

    fusion_bytes: int = FUSION_BYTES  # HOROVOD_FUSION_THRESHOLD
    warn_s: float | None = 60.0  # HOROVOD_STALL_CHECK_TIME_SECONDS
    end_s: float | None = 300.0  # HOROVOD_STALL_SHUTDOWN_TIME_SECONDS; guard.stall_s has the same default
    timeline: str | None = None  # HOROVOD_TIMELINE: a path
    marks_cycles: bool = False  # HOROVOD_TIMELINE_MARK_CYCLES
    deadlock_s: float = 2.0  # without progress while every rank waits: no rank can go on


def settings_of(environ: Mapping[str, str]) -> Settings:
    """Raises UserError for a value that is no number, or one that means nothing."""
    path = environ.get("HOROVOD_TIMELINE") or None
    default = Settings(
        timeline=None if path == "DYNAMIC" else path,  # Horovod's word for: not from the beginning
        marks_cycles=bool(_number(environ, "HOROVOD_TIMELINE_MARK_CYCLES", 0.0)),
    )
    if _number(environ, "HOROVOD_STALL_CHECK_DISABLE", 0.0):
        return default._replace(fusion_bytes=_fusion_bytes(environ), warn_s=None, end_s=None)
    return default._replace(
        fusion_bytes=_fusion_bytes(environ),
        warn_s=_number(environ, "HOROVOD_STALL_CHECK_TIME_SECONDS", default.warn_s),
        end_s=_number(environ, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", default.end_s),
    )


def _fusion_bytes(environ: Mapping[str, str]) -> int:
    number = _number(environ, "HOROVOD_FUSION_THRESHOLD", FUSION_BYTES) or 0
    if math.isinf(number):
        raise _unusable(environ, "HOROVOD_FUSION_THRESHOLD", "a number of bytes, as 67108864; 0: nothing is fused")
    return int(number)


def _number(environ: Mapping[str, str], name: str, default: float | None) -> float | None:
    """None for 0, which switches off."""
    text = environ.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number >= 0:
        raise _unusable(environ, name, "a number; 0 switches it off")
    return number or None


def _unusable(environ: Mapping[str, str], name: str, fix: str) -> UserError:
    return UserError(f"{name}={environ[name]!r} is not a number of 0 or more", "the environment", fix)
