"""A communicator that records the data that it moves. It wraps a real communicator, or simulates
one for hypothetical ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from hvdtrain.comm.communicator import AroundCommunicator, Buffer, Communicator, Handle, part_of

Kind = Literal["allreduce", "broadcast", "reduce", "reduce-scatter", "all-gather", "message"]


class Moved(NamedTuple):
    """One collective, or one message that this rank sends."""

    kind: Kind
    name: str  # its stable name
    # ranks of the job that take part; for a message, the sender and the receiver
    ranks: tuple[int, ...]
    size_bytes: int  # size of the result on all ranks together, or of the summed buffer
    # bytes that leave this rank if each byte is sent directly to the rank that needs it
    sent_bytes: int


def counted(
    communicator: Communicator, moved: list[Moved], ranks: Sequence[int] = ()
) -> Communicator:
    """Returns a communicator that appends each transfer to `moved`. ranks: the job's ranks in this
    group, in its order; default: 0, 1, ..."""
    result: Any = _Counted(communicator, moved, tuple(ranks) or tuple(range(communicator.size)))
    return result


_KINDS: dict[str, Kind] = {
    "allreduce": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "reduce_scatter": "reduce-scatter",
    "spread": "all-gather",
    "allgather": "all-gather",
}


class _Counted(AroundCommunicator):
    """Forwards uncounted operations to the wrapped communicator: objects, the side channel,
    abort()."""

    def __init__(self, within: Any, moved: list[Moved], ranks: tuple[int, ...]) -> None:
        super().__init__(within)
        self._moved = moved
        self._ranks = ranks

    def pass_on(self, collective: str, x: Buffer, name: str, *more: Any) -> Any:
        kind = _KINDS[collective.removeprefix("start_")]
        sent_bytes = self._sent_bytes(collective.removeprefix("start_"), x, *more)
        size_bytes = x.nbytes
        result = super().pass_on(collective, x, name, *more)
        if self.within.size > 1:
            self._moved.append(
                Moved(
                    kind,
                    name,
                    self._ranks,
                    result.nbytes if collective == "allgather" else size_bytes,
                    sent_bytes,
                )
            )
        return result

    def _sent_bytes(self, collective: str, x: Buffer, *more: Any) -> int:
        rank = self.within.rank
        others = self.within.size - 1
        nbytes = int(x.nbytes)
        if collective == "allreduce":
            return 2 * nbytes * others // (others + 1)
        if collective == "broadcast":
            return nbytes * others * (rank == more[0])
        if collective == "reduce":
            return nbytes * (rank != more[0])
        if collective == "allgather":
            return nbytes * others
        own = int(x[part_of(len(x), rank, others + 1)].nbytes)
        return own * others if collective == "spread" else nbytes - own

    def start_send(self, x: Buffer, to: int, name: str, tag: int = 0) -> Handle:
        self._moved.append(
            Moved(
                "message",
                name,
                (self._ranks[self.within.rank], self._ranks[to]),
                x.nbytes,
                x.nbytes,
            )
        )
        handle: Handle = self.within.start_send(x, to, name, tag)
        return handle

    def split(self, color: int | None) -> Communicator | None:
        own = self.within.split(color)
        return None if own is None else counted(own, self._moved)
