"""What the ranks of a process set make next, from what each of them has asked for: a pure function, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvdtrain.horovod.engine.requests import Key, Signature


class Asked(NamedTuple):
    """A request of a rank that the others may see."""

    signature: Signature
    bucket: int


class Standing(NamedTuple):
    """What a rank asks for in a round."""

    rank: int  # of the job
    asked: Sequence[Asked]  # in the order of its program
    joined: bool = False  # takes part in everything, with nothing of its own
    leaving: bool = False  # asks for nothing more
    blocked: bool = False  # every thread of it waits, and asks for nothing more until it has what it waits for
    overdue: bool = False  # has waited for long without any progress


class Ready(NamedTuple):
    """Every rank that takes part has asked for it."""

    signature: Signature
    buckets: tuple[int, ...]  # of each rank that asked


class Refusal(NamedTuple):
    """Why a request that cannot be made is not."""

    what: str
    of_missing: bool  # a rank does not take part; otherwise ranks take part differently


class Decision(NamedTuple):
    ready: list[Ready]  # in the order of the first rank that has not joined
    refused: dict[Key, Refusal]
    missing: dict[Key, list[int]]  # the ranks that have not asked for it yet; only what is neither ready nor refused


def decide(standings: Sequence[Standing]) -> Decision:
    """standings: in the order of ranks."""
    by_rank = {standing.rank: {asked.signature.key: asked for asked in standing.asked} for standing in standings}
    active = [standing.rank for standing in standings if not standing.joined]
    joined = [standing.rank for standing in standings if standing.joined]
    leaving = [standing.rank for standing in standings if standing.leaving]
    ready: list[Ready] = []
    refused: dict[Key, Refusal] = {}
    missing: dict[Key, list[int]] = {}
    for key in dict.fromkeys(key for standing in standings for key in by_rank[standing.rank]):
        asked = {rank: by_rank[rank][key] for rank in by_rank if key in by_rank[rank]}
        absent = [rank for rank in active if rank not in asked]
        if gone := [rank for rank in absent if rank in leaving]:
            refused[key] = Refusal(f"{ranks_text(gone)} ended without it; {ranks_text(list(asked))} asked for it", True)
        elif absent:
            missing[key] = absent
        elif (root := next(iter(asked.values())).signature.root) in joined:
            refused[key] = Refusal(f"its root, rank {root}, has joined", True)
        elif difference := differing({rank: each.signature for rank, each in asked.items()}):
            refused[key] = Refusal(difference, False)
        else:
            ready.append(Ready(next(iter(asked.values())).signature, tuple(each.bucket for each in asked.values())))
    if _is_deadlock(standings, ready, refused, missing):
        return Decision([], _deadlock(standings, missing), {})
    return Decision(ready, refused, missing)


def _is_deadlock(standings: Sequence[Standing], ready: Sequence[Ready], refused: dict[Key, Refusal], missing: dict[Key, list[int]]) -> bool:
    if ready or refused or not missing or not any(standing.overdue for standing in standings):
        return False
    return all(standing.blocked or standing.joined or standing.leaving for standing in standings)


def _deadlock(standings: Sequence[Standing], missing: dict[Key, list[int]]) -> dict[Key, Refusal]:
    """Everything that is asked for, with what each rank waits for."""
    text = "; ".join(_waits(standing) for standing in standings)
    return {key: Refusal(f"{ranks_text(absent)} did not ask for it and cannot: {text}", True) for key, absent in missing.items()}


def _waits(standing: Standing) -> str:
    if standing.joined:
        return f"rank {standing.rank} has joined"
    calls = [asked.signature.where for asked in standing.asked]
    if not calls:
        return f"rank {standing.rank} asked for nothing"
    more = f" and {len(calls) - 3} more" if len(calls) > 3 else ""
    return f"rank {standing.rank} waits for {', '.join(calls[:3])}{more}"


def differing(signatures: dict[int, Signature]) -> str:
    """What differs between two ranks, and their values; empty where nothing does."""
    (first, one), *others = signatures.items()
    for rank, other in others:
        if other != one:
            fields = [field for field in FIELDS if getattr(one, field) != getattr(other, field)]
            found = ", ".join(
                f"{FIELDS[field]} {_value(one, field)} on rank {first}, {_value(other, field)} on rank {rank}" for field in fields
            )
            return f"ranks do not agree: {found}"
    return ""


FIELDS = {
    "op": "op",
    "dtypes": "dtype",
    "shapes": "shape",
    "root": "root_rank",
    "prescale": "prescale_factor",
    "postscale": "postscale_factor",
    "ranks": "ranks",
    "devices": "device",
}


def _value(signature: Signature, field: str) -> str:
    """A field as a message shows it: the tensor itself where there is one alone, "any" for a length that may differ."""
    value = getattr(signature, field)
    if field in ("dtypes", "shapes", "devices") and len(value) == 1:
        value = value[0]
    return str(value).replace("-1", "any") if field == "shapes" else str(value)


def ranks_text(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 2" """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
