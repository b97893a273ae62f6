"""Decides the next collectives of a process set, as a pure function of the ranks' requests; and the
block with which a rank announces its requests in a round."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from hvdtrain.horovod.engine.requests import Key, Request, Signature, combined, digest


class Asked(NamedTuple):
    """A rank's request that is visible to the other ranks."""

    signature: Signature
    bucket: int


class Standing(NamedTuple):
    """A rank's requests in a round."""

    rank: int  # rank in the job
    asked: Sequence[Asked]  # in the order of its program
    joined: bool = False  # takes part in everything without contributing
    leaving: bool = False  # makes no more requests
    blocked: bool = False  # every thread waits, and requests nothing more until it has its result
    overdue: bool = False  # has waited for a long time without progress


class Ready(NamedTuple):
    """A request that every participating rank has made."""

    signature: Signature
    buckets: tuple[int, ...]  # bucket of each requesting rank


class Refusal(NamedTuple):
    """Why a request cannot be carried out."""

    what: str
    of_missing: bool  # a rank does not take part; otherwise ranks take part differently


class NegotiationResult(NamedTuple):
    ready: list[Ready]  # in the order of the first active rank
    refused: dict[Key, Refusal]
    # the ranks that have not requested it yet; only for requests that are neither ready nor
    # rejected
    missing: dict[Key, list[int]]


def decide(standings: Sequence[Standing]) -> NegotiationResult:
    """Decides what to run. standings: in rank order."""
    by_rank = {
        standing.rank: {asked.signature.key: asked for asked in standing.asked}
        for standing in standings
    }
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
            refused[key] = Refusal(
                f"{ranks_text(gone)} ended without it; {ranks_text(list(asked))} asked for it", True
            )
        elif absent:
            missing[key] = absent
        elif (root := next(iter(asked.values())).signature.root) in joined:
            refused[key] = Refusal(f"its root, rank {root}, has joined", True)
        elif difference := differing({rank: each.signature for rank, each in asked.items()}):
            refused[key] = Refusal(difference, False)
        else:
            ready.append(
                Ready(
                    next(iter(asked.values())).signature,
                    tuple(each.bucket for each in asked.values()),
                )
            )
    if _is_deadlock(standings, ready, refused, missing):
        return NegotiationResult([], _deadlock(standings, missing), {})
    return NegotiationResult(ready, refused, missing)


def _is_deadlock(
    standings: Sequence[Standing],
    ready: Sequence[Ready],
    refused: dict[Key, Refusal],
    missing: dict[Key, list[int]],
) -> bool:
    if ready or refused or not missing or not any(standing.overdue for standing in standings):
        return False
    return all(standing.blocked or standing.joined or standing.leaving for standing in standings)


def _deadlock(standings: Sequence[Standing], missing: dict[Key, list[int]]) -> dict[Key, Refusal]:
    """Returns a rejection of every request, with what each rank waits for."""
    text = "; ".join(_waits(standing) for standing in standings)
    return {
        key: Refusal(f"{ranks_text(absent)} did not ask for it and cannot: {text}", True)
        for key, absent in missing.items()
    }


def _waits(standing: Standing) -> str:
    if standing.joined:
        return f"rank {standing.rank} has joined"
    calls = [asked.signature.where for asked in standing.asked]
    if not calls:
        return f"rank {standing.rank} asked for nothing"
    more = f" and {len(calls) - 3} more" if len(calls) > 3 else ""
    return f"rank {standing.rank} waits for {', '.join(calls[:3])}{more}"


def differing(signatures: dict[int, Signature]) -> str:
    """Returns a difference between two ranks and their values; empty if there is none."""
    (first, one), *others = signatures.items()
    for rank, other in others:
        if other != one:
            fields = [field for field in FIELDS if getattr(one, field) != getattr(other, field)]
            found = ", ".join(
                f"{FIELDS[field]} {_value(one, field)} on rank {first}, {_value(other, field)} on "
                f"rank {rank}"
                for field in fields
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
    """Formats a field for a message: a single tensor's value directly, and "any" for a length that
    may differ."""
    value = getattr(signature, field)
    if field in ("dtypes", "shapes", "devices") and len(value) == 1:
        value = value[0]
    return str(value).replace("-1", "any") if field == "shapes" else str(value)


def ranks_text(ranks: Sequence[int]) -> str:
    """Formats ranks: "rank 3", "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


HEADER = 6  # numbers: count of requests, digest, special flags, inline bytes, own flags, unused
# special flags: ranks do not just run the common requests
JOINED = 1
LEAVING = 2
# own flags
BLOCKED = 1
OVERDUE = 2
_COMPARED = 4  # leading numbers that are equal if no second exchange is needed
_BYTES = 8  # size of a number
_PLACES = 16  # bytes; tensors begin at multiples, so that they can be viewed as complex128
# limit for small tensors: with the header 496 bytes from every rank, which take no longer than the
# header alone
INLINE_BYTES = 448
INLINE_RANKS = 8  # sets of more ranks exchange only headers
INLINE_REQUESTS = 16
_INLINE_OPS = ("average", "sum", "min", "max", "product")
P = ParamSpec("P")
T = TypeVar("T")


class TensorViews(NamedTuple):
    """Place of a tensor in the blocks: views of their memory, as one dimension."""

    own: torch.Tensor
    of_ranks: list[torch.Tensor]


class NegotiationBlock:
    """The block of one rank, and the blocks of all ranks."""

    def __init__(self, size: int) -> None:
        """size: number of ranks in the set."""
        self._has_inline = size <= INLINE_RANKS
        length = HEADER + (INLINE_BYTES // _BYTES if self._has_inline else 0)
        self.own = np.zeros(length, np.int64)
        self.rows = np.zeros((size, length), np.int64)
        self._places: dict[tuple[int, int, torch.dtype], TensorViews] = {}

    def fill(self, requests: Sequence[Request], special: int, own: int) -> None:
        """Fills in this rank's block. requests: this rank's requests, in order; buckets are
        relative to the first."""
        self.own[:HEADER] = (
            len(requests),
            _digest(requests),
            special,
            self._put_inline(requests),
            own,
            0,
        )

    def is_equal(self) -> bool:
        """Whether every rank has the same requests, and no rank has joined or is leaving."""
        first = self.rows[0, :_COMPARED].tobytes()
        return not self.rows[0, 2] and all(
            row[:_COMPARED].tobytes() == first for row in self.rows[1:]
        )

    @property
    def has_tensors(self) -> bool:
        """Whether the blocks, which are equal, contain all requested tensors."""
        return bool(self.rows[0, 3])

    def places_of(self, requests: Sequence[Request]) -> list[TensorViews]:
        """Returns places of every tensor of requests that are sent inline, in order."""
        places = []
        start = 0
        for request in requests:
            for tensor in request.inputs:
                key = start, tensor.numel(), tensor.dtype
                if key not in self._places:
                    self._places[key] = self._place(*key)
                places.append(self._places[key])
                start += _rounded(tensor)
        return places

    def _place(self, start: int, numbers: int, dtype: torch.dtype) -> TensorViews:
        end = start + numbers * dtype.itemsize
        own, *of_ranks = (
            torch.from_numpy(row[HEADER:].view(np.uint8))[start:end].view(dtype)
            for row in (self.own, *self.rows)
        )
        return TensorViews(own, of_ranks)

    def _put_inline(self, requests: Sequence[Request]) -> int:
        """Writes small tensors into the block. Returns the number of bytes; 0 if they do not fit,
        -1 if there is nothing to send."""
        if not self._has_inline or not 0 < len(requests) <= INLINE_REQUESTS:
            return 0
        total = sum(_inline_bytes(request) for request in requests)
        if total > INLINE_BYTES:
            return 0
        if not total:
            return -1
        tensors = [tensor for request in requests for tensor in request.inputs]
        for place, tensor in zip(self.places_of(requests), tensors, strict=True):
            place.own.copy_(tensor.view(-1))
        return total


def _digest(requests: Sequence[Request]) -> int:
    if not requests:
        return 0
    first = requests[0].bucket
    return combined([digest(request.signature) + request.bucket - first for request in requests])


def _inline_bytes(request: Request) -> int:
    """Returns the bytes to send inline; more than fits for requests that cannot be sent inline."""
    signature = request.signature
    if not (
        signature.kind == "allreduce" and signature.op in _INLINE_OPS
    ) and signature.kind not in ("broadcast", "barrier"):
        return INLINE_BYTES + 1
    if any(tensor.device.type != "cpu" for tensor in request.inputs):
        return INLINE_BYTES + 1
    return sum(_rounded(tensor) for tensor in request.inputs)


def _rounded(tensor: torch.Tensor) -> int:
    """Returns a tensor's bytes, rounded up to whole numbers of the block."""
    return -(-tensor.numel() * tensor.element_size() // _PLACES) * _PLACES


def outside_of_inference(function: Callable[P, T]) -> Callable[P, T]:
    """Runs the function outside of the caller's torch.inference_mode(): tensors created in that
    mode cannot be changed after it.

    Tensors that rounds keep between calls must be usable outside of it.
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return outside
