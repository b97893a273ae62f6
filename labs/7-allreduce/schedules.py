"""Four ways to add up an array over ranks, as tables: what each rank sends and receives in each
step.

An array is divided into as many chunks as there are ranks. simulate() follows the chunks without
any network; measure.py sends them with MPI.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """What one rank does in one step; None where it does nothing.

    send, receive: (other rank, first chunk, chunk after the last). adds: what it receives is added
    to its own; otherwise it replaces it.
    """

    send: tuple[int, int, int] | None
    receive: tuple[int, int, int] | None
    adds: bool


Step = list[Move]  # of each rank


def ring(size: int) -> list[Step]:
    """Reduce-scatter in size - 1 steps, then all-gather in as many (Patarasuk and Yuan 2009): each
    rank sends to the next one, one chunk at a time."""
    return ring_reduce_scatter(size) + ring_all_gather(size)


def ring_reduce_scatter(size: int) -> list[Step]:
    """After it rank r has the sum of chunk r + 1."""
    return [_around(size, step, adds=True) for step in range(size - 1)]


def ring_all_gather(size: int) -> list[Step]:
    return [_around(size, step - 1, adds=False) for step in range(size - 1)]


def _around(size: int, step: int, adds: bool) -> Step:
    moves = []
    for rank in range(size):
        sent = (rank - step) % size
        got = (rank - step - 1) % size
        moves.append(
            Move(((rank + 1) % size, sent, sent + 1), ((rank - 1) % size, got, got + 1), adds)
        )
    return moves


def tree(size: int) -> list[Step]:
    """Sums go up a binomial tree to rank 0, and the result comes down again: few steps, each with
    the whole array."""
    distances = _distances(size)
    up = [_level(size, distance, adds=True) for distance in distances]
    return up + [_level(size, distance, adds=False) for distance in reversed(distances)]


def _level(size: int, distance: int, adds: bool) -> Step:
    """Between each rank whose number is a multiple of 2 distance and the one `distance` above."""
    moves = []
    for rank in range(size):
        low = rank % (2 * distance) == 0
        high = rank % (2 * distance) == distance
        other = rank + distance if low else rank - distance
        whole = (other, 0, size)
        sends = high if adds else low
        takes = low if adds else high
        moves.append(Move(whole if sends else None, whole if takes else None, adds))
    return moves


def halving_doubling(size: int) -> list[Step]:
    """Recursive halving, then doubling (Rabenseifner 2004), for a power of two: partners at
    distance size / 2, size / 4, ... exchange the half that the other keeps; then back."""
    parts = [(0, size)] * size
    steps = []
    kept = []
    for distance in reversed(_distances(size)):
        kept.append(parts)
        halves = []
        moves = []
        for rank, (first, last) in enumerate(parts):
            middle = (first + last) // 2
            halves.append((first, middle) if rank & distance == 0 else (middle, last))
            given = (middle, last) if rank & distance == 0 else (first, middle)
            other = rank ^ distance
            moves.append(Move((other, *given), (other, *halves[rank]), adds=True))
        parts = halves
        steps.append(moves)
    for distance, before in zip(_distances(size), reversed(kept), strict=True):
        steps.append(
            [
                Move(
                    (rank ^ distance, *parts[rank]),
                    (rank ^ distance, *parts[rank ^ distance]),
                    False,
                )
                for rank in range(size)
            ]
        )
        parts = before
    return steps


def _distances(size: int) -> list[int]:
    """1, 2, 4, ... below size. Raises ValueError for another number than a power of two."""
    if size < 2 or size & (size - 1):
        raise ValueError(f"{size} ranks are not a power of two")
    return [2**power for power in range(size.bit_length() - 1)]


SCHEDULES = {"ring": ring, "tree": tree, "halving, doubling": halving_doubling}

# of each rank, of each chunk: the ranks whose numbers are in it
Held = list[list[frozenset[int]]]


def simulate(steps: Sequence[Step], size: int) -> list[Held]:
    """Who holds what before the first step and after each."""
    held: Held = [[frozenset([rank]) for _ in range(size)] for rank in range(size)]
    found = [held]
    for moves in steps:
        after = [list(chunks) for chunks in held]
        for rank, move in enumerate(moves):
            if move.receive is None:
                continue
            other, first, last = move.receive
            assert moves[other].send == (rank, first, last), "what is received was sent"
            for chunk in range(first, last):
                sent = held[other][chunk]
                after[rank][chunk] = held[rank][chunk] | sent if move.adds else sent
        held = after
        found.append(held)
    return found


def chunks_added(steps: Sequence[Step]) -> int:
    """The chunks that one rank after another has to add: the most of a rank in each step, added
    up."""
    return sum(
        max(0 if move.receive is None else move.receive[2] - move.receive[1] for move in moves)
        for moves in steps
        if moves[0].adds
    )


def chunks_of_busiest(steps: Sequence[Step]) -> int:
    """The chunks that one rank after another has to send: the most of a rank in each step, added
    up."""
    return sum(
        max(0 if move.send is None else move.send[2] - move.send[1] for move in moves)
        for moves in steps
    )
