"""Which samples the dense layers compute in which turn of a step (Krizhevsky 2014, arXiv:1404.5997, section 3), and how fast they learn."""

from __future__ import annotations

from typing import Literal

from hvdtrain.comm.communicator import part_of

Scheme = Literal["a", "b", "c"]
Turn = list[range]  # which of its rows each rank gives


def rows_of_turns(scheme: Scheme, rows: list[int]) -> list[Turn]:
    """The turns of a step with one update; rows[rank] is how many a rank has. Turns without any are left out.

    a: all ranks all of them, in one turn; b: one rank after the other all of its own; c: in as many turns as there are ranks, each rank
    1 / ranks of them (section 3, forward pass, step 3).
    """
    size = len(rows)
    if scheme == "a":
        turns = [[range(own) for own in rows]]
    elif scheme == "b":
        turns = [[range(own if rank == turn else 0) for rank, own in enumerate(rows)] for turn in range(size)]
    else:
        turns = [[range(own)[part_of(own, turn, size)] for own in rows] for turn in range(size)]
    return [turn for turn in turns if any(turn)]


def rows_of_updates(scheme: Scheme, rows: list[int], updates: int) -> list[Turn]:
    """The turns of a step in which the dense layers are updated after each: as many, but for turns without any rows.

    The rows of all ranks, in rank order, are one batch, of which a turn has the same rows on any number of ranks. b: neighbours, which are
    those of one rank where there are as many updates as ranks, with equal shares; c: each `updates`-th, so that all ranks give some.
    """
    assert scheme != "a", "a has one turn"
    turns = []
    for turn in range(updates):
        part, first = part_of(sum(rows), turn, updates), 0
        turns.append(list[range]())
        for own in rows:
            if scheme == "b":
                turns[-1].append(range(own)[max(part.start - first, 0) : max(part.stop - first, 0)])
            else:
                turns[-1].append(range(own)[(turn - first) % updates :: updates])
            first += own
    return [turn for turn in turns if any(turn)]


def turn_learning_rate(lr: float, samples: int, batch: int) -> float:
    """Rate of the dense part in a turn of so many samples, where `lr` is that of the whole batch: in proportion to the batch.

    Krizhevsky 2014, section 5: theory asks for the square root of the ratio of the batches; the ratio itself was what worked best, and
    with it momentum and the coefficient of weight decay stay as they are.
    """
    return lr * samples / batch
