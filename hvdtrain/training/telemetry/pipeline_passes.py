"""The passes of one step on all ranks of a pipeline, on one clock: the event "passes"."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.learner import TimedPass

MOST_PASSES = 4096  # of an event


def gather_passes(communicator: Communicator, own: Sequence[TimedPass], apart: int) -> dict[str, Any]:
    """Fields of the event, of ranks 0, `apart`, 2 x `apart`, ...: one pipeline. Every rank calls it.

    Empty where there are more than MOST_PASSES.
    """
    mine = [tuple(each) for each in own] if communicator.rank % apart == 0 else []
    found = [[TimedPass(*each) for each in of_rank] for of_rank in communicator.allgather_object(mine)[::apart]]
    if not 0 < sum(map(len, found)) <= MOST_PASSES:
        return {}
    aligned = on_one_clock(found)
    begin_s = min(each.start_s for of_rank in aligned for each in of_rank)
    rows = [[_row(each, begin_s) for each in of_rank] for of_rank in aligned]
    return {"passes": rows, "passes_of_ranks": [rank * apart for rank in range(len(rows))]}


def _row(one: TimedPass, begin_s: float) -> list[Any]:
    """[kind, stage, micro-batch, begin of waiting, begin of computing, end], in milliseconds since the first pass."""
    times_s = one.start_s, one.start_s + one.waited_s, one.stop_s
    return [one.kind, one.stage, one.micro, *(round(1e3 * (time_s - begin_s), 3) for time_s in times_s)]


def on_one_clock(ranks: Sequence[Sequence[TimedPass]]) -> list[list[TimedPass]]:
    """The passes of each rank by the first one's clock.

    Ranks of one host have one clock. Those of two hosts do not: nothing arrives before it was sent, in both directions, which bounds how
    far the second clock is ahead; where 0 is not within the bounds, it is taken to be in their middle (as Mills 1991, RFC 5905, does).
    """
    moved, total_s = [list(ranks[0])], 0.0
    for before, passes in itertools.pairwise(ranks):
        least, most = _bounds(before, passes)
        if not least <= 0.0 <= most and math.isfinite(least) and math.isfinite(most):
            total_s += (least + most) / 2
        moved.append([one._replace(start_s=one.start_s - total_s, stop_s=one.stop_s - total_s) for one in passes])
    return moved


def _bounds(first: Sequence[TimedPass], second: Sequence[TimedPass]) -> tuple[float, float]:
    """The least and the most seconds by which the clock of `second` may be ahead."""
    passes = {(one.kind == "forward", one.stage, one.micro): one for one in first if one.kind != "weight gradient"}
    least, most = -math.inf, math.inf
    for two in second:
        one = passes.get((two.kind == "forward", two.stage - 1, two.micro))
        if one is None or two.kind == "weight gradient":
            continue
        if two.kind == "forward":  # one sends, when its pass is over; two begins to compute later
            most = min(most, two.start_s + two.waited_s - one.stop_s)
        else:
            least = max(least, two.stop_s - one.start_s - one.waited_s)
    return least, most
