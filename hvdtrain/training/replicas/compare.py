"""Checks that ranks stay equal, by digests of weights, buffers, optimizer state, learning rate and
step.

Replicated arrays are compared over all ranks; a part of an array (shard.stage, parallel) over the
ranks that have the same part.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.core.arrays import Piece, combine, digests_of_pieces
from hvdtrain.core.progress import Hyper
from hvdtrain.errors import Diverged
from hvdtrain.frameworks.learner import HasState

MOST_RANKS = 8  # ranks named in a message


def check_equal(
    communicator: Communicator, learner: HasState, last: Hyper, hosts: list[str]
) -> str:
    """Returns the common digest. Every rank calls it, after sync_buffers(). last: of the last step.

    Raises the same Diverged on every rank if one rank differs.
    """
    tables = digest_tables(learner.pieces())
    tables.whole.update({"learning rate": _bits(last.lr), "step": last.step})
    combined = combine(tables.whole)
    # the second identifies the parts of this rank
    numbers = [
        combined,
        combine(dict.fromkeys(tables.parts, 0)),
        combine(tables.parts),
    ]
    own = np.array([int(number, 16) for number in numbers], np.uint64).view(np.int64)
    of_all = communicator.allgather(own, "equal").reshape(-1, len(own)).tolist()
    copies = {(which, parts) for _, which, parts in of_all}
    sets = {which for which, _ in copies}
    is_equal = len({whole for whole, _, _ in of_all}) == 1 and len(copies) == len(sets)
    if is_equal and (len(sets) == 1 or _copies_are_equal(communicator, tables.parts)):
        return combined
    raise explain(communicator.allgather_object(tables), hosts, last.step + 1)


def _copies_are_equal(communicator: Communicator, parts: dict[str, int]) -> bool:
    """Whether each part is the same on all ranks that have it, even if their other parts differ, as
    for stages that share a weight."""
    own = np.array(
        [(int(combine({name: 0}), 16), number) for name, number in parts.items()], np.uint64
    ).reshape(-1, 2)
    of_all = communicator.allgather(own.view(np.int64), "equal parts")
    return len(np.unique(of_all, axis=0)) == len(np.unique(of_all[:, 0]))


class DigestTables(NamedTuple):
    """64-bit digests by name."""

    whole: dict[str, int]  # of replicated arrays
    parts: dict[str, int]  # of this rank's parts


def digest_tables(pieces: Iterable[Piece]) -> DigestTables:
    names_of_parts = set()

    def named() -> Iterator[tuple[str, Piece]]:
        for piece in pieces:
            name = piece.name
            if not piece.is_whole:
                name = f"{piece.name}{_part(piece)}"
                names_of_parts.add(name)
            yield name, piece

    found = digests_of_pieces(named())
    whole = {name: number for name, number in found.items() if name not in names_of_parts}
    return DigestTables(whole, {name: found[name] for name in found if name in names_of_parts})


class Minority(NamedTuple):
    """The ranks whose value is not the most frequent one."""

    usual: Any  # the most frequent value
    majority: list[int]  # the ranks with the most frequent value
    value: Any  # the value of the first rank in the minority
    ranks: list[int]
    where: str  # for messages: the ranks of the minority with their hosts


def describe_minority(
    values: Sequence[Hashable], hosts: Sequence[str], among: Sequence[int] | None = None
) -> Minority:
    """Returns which ranks of `among` (default: all) differ. values[rank] and hosts[rank] belong to
    `rank`; not all values are equal."""
    among = range(len(values)) if among is None else among
    usual, count = Counter(values[rank] for rank in among).most_common(1)[0]
    majority = [rank for rank in among if values[rank] == usual]
    ranks = [rank for rank in among if values[rank] != usual]
    named = ", ".join(f"{rank} on {hosts[rank]}" for rank in ranks[:MOST_RANKS])
    if len(ranks) > MOST_RANKS:
        named += f" and {len(ranks) - MOST_RANKS} more"
    where = (
        f"rank{'s' if len(ranks) > 1 else ''} {named}, against {count} equal "
        f"rank{'s' if count > 1 else ''}"
    )
    if 2 * count <= len(among):
        where += "; there is no majority, so it is unknown which of them is wrong"
    return Minority(usual, majority, values[ranks[0]], ranks, where)


def explain(tables: Sequence[DigestTables], hosts: list[str], step: int) -> Diverged:
    """Names the first entry that differs, in the order of the model, and the ranks in the minority;
    tables[rank] has rank's digests."""
    ranks_of = {name: list(range(len(tables))) for table in tables for name in table.whole}
    for rank, table in enumerate(tables):
        for name in table.parts:
            ranks_of.setdefault(name, []).append(rank)
    values = {
        name: [(table.whole | table.parts).get(name) for table in tables] for name in ranks_of
    }
    different = [
        name for name, ranks in ranks_of.items() if len({values[name][rank] for rank in ranks}) > 1
    ]
    name = different[0]
    others = len(different) - 1
    where = describe_minority(values[name], hosts, ranks_of[name]).where
    fix = (
        "the newest checkpoint is older: start the same command again; if ranks differ again, the "
        "cause is that host's memory, or a "
        "model that is not the same on all ranks: its forward depends on a random number, a clock "
        "or the rank"
    )
    return Diverged(
        f"ranks differ after step {step}: {name}{f' and {others} more' if others else ''}",
        where,
        fix,
    )


def _part(piece: Piece) -> str:
    """Returns for example "[0:40]", or "[0:40 of part 2 of 2 along axis 1]"."""
    cut = piece.cut
    return f"[{piece.start}:{piece.stop}{f' of part {cut.part + 1} of {cut.parts} along axis {cut.axis}' * (cut.parts > 1)}]"  # noqa: E501


def _bits(number: float) -> int:
    return int.from_bytes(struct.pack(">d", number), "big")
