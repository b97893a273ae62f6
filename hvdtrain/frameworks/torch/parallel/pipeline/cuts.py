"""Where a row of units is cut into stages, so that the slowest stage is as fast as can be."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hvdtrain.errors import UserError


def balanced_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """The first unit of each stage, 0 first: the largest sum of costs in a stage is the least that there is.

    Each stage has one unit or more. Dynamic programming over the last cut: units^2 x stages steps. Raises UserError for fewer units than
    stages.
    """
    units = len(costs)
    if not 1 <= stages <= units:
        what = f"a model of {units} units makes no {stages} stages: each stage has one unit or more"
        raise UserError(what, "parallel.pipeline, parallel.virtual", f"at most {units} stages in all, or a model with more layers")
    sums = [0.0, *itertools.accumulate(costs)]
    slowest = list(sums)  # [stop]: of the units before `stop`, in the stages so far
    last_cuts: list[list[int]] = []
    for stage in range(1, stages):
        least, cuts = [float("inf")] * (units + 1), [0] * (units + 1)
        for stop in range(stage + 1, units + 1):
            for start in range(stage, stop):
                largest = max(slowest[start], sums[stop] - sums[start])
                if largest < least[stop]:
                    least[stop], cuts[stop] = largest, start
        slowest = least
        last_cuts.append(cuts)
    found, stop = [], units
    for cuts in reversed(last_cuts):
        stop = cuts[stop]
        found.append(stop)
    return [0, *reversed(found)]


def given_cuts(balance: Sequence[int], names: Sequence[str], where: str) -> list[int]:
    """The first unit of each stage, from the number of units of each. Raises UserError where these are not all units, `names`."""
    if sum(balance) != len(names):
        what = f"parallel.balance={list(balance)} has {sum(balance)} units, the model has {len(names)}: {', '.join(names)}"
        raise UserError(what, where, f"{len(balance)} numbers with a sum of {len(names)}: hvdtrain plan --pipeline shows them")
    return [0, *itertools.accumulate(balance[:-1])]
