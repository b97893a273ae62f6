"""What the calls of Horovod's API stand on: an engine that takes requests of process sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from hvdtrain.horovod.engine.requests import Request

GLOBAL = 0  # id of the process set of all ranks


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
