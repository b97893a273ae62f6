"""The block that a rank gives to a round: how much it asks for, a digest of it, its state, and small tensors themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch

from hvdtrain.horovod.engine.requests import Request, combined, digest

HEADER = 6  # numbers: how many requests, digest, special flags, bytes inline, own flags, unused
JOINED, LEAVING = 1, 2  # special flags: ranks do not only make what all of them ask for
BLOCKED, OVERDUE = 1, 2  # own flags
_COMPARED = 4  # numbers at the beginning that are equal where nothing needs a second exchange
_BYTES = 8  # of a number
_PLACES = 16  # bytes, of which the place of a tensor is a multiple: a view as complex128 begins there
INLINE_BYTES = 448  # of small tensors: with the header 496 bytes of every rank, which take no longer than the header alone
INLINE_RANKS = 8  # sets of more ranks exchange headers alone
INLINE_REQUESTS = 16
_INLINE_OPS = ("average", "sum", "min", "max", "product")
P = ParamSpec("P")
T = TypeVar("T")


class Place(NamedTuple):
    """Place of a tensor in the blocks: views of their memory, as one dimension."""

    own: torch.Tensor
    of_ranks: list[torch.Tensor]


class Block:
    """The block of one rank, and those that all of them give."""

    def __init__(self, size: int) -> None:
        """size: ranks of the set."""
        self._has_inline = size <= INLINE_RANKS
        length = HEADER + (INLINE_BYTES // _BYTES if self._has_inline else 0)
        self.own, self.rows = np.zeros(length, np.int64), np.zeros((size, length), np.int64)
        self._places: dict[tuple[int, int, torch.dtype], Place] = {}

    def fill(self, requests: Sequence[Request], special: int, own: int) -> None:
        """requests: what this rank asks for, in order; buckets count relative to the first."""
        self.own[:HEADER] = len(requests), _digest(requests), special, self._put_inline(requests), own, 0

    def is_equal(self) -> bool:
        """Whether every rank asks for the same, and none of them has joined or is leaving."""
        first = self.rows[0, :_COMPARED].tobytes()
        return not self.rows[0, 2] and all(row[:_COMPARED].tobytes() == first for row in self.rows[1:])

    @property
    def has_tensors(self) -> bool:
        """Whether the blocks, which are equal, have all that was asked for."""
        return bool(self.rows[0, 3])

    def places(self, requests: Sequence[Request]) -> list[Place]:
        """Places of every tensor of requests that are sent inline, in order."""
        found, start = [], 0
        for request in requests:
            for tensor in request.inputs:
                key = start, tensor.numel(), tensor.dtype
                if key not in self._places:
                    self._places[key] = self._place(*key)
                found.append(self._places[key])
                start += _rounded(tensor)
        return found

    def _place(self, start: int, numbers: int, dtype: torch.dtype) -> Place:
        end = start + numbers * dtype.itemsize
        own, *of_ranks = (torch.from_numpy(row[HEADER:].view(np.uint8))[start:end].view(dtype) for row in (self.own, *self.rows))
        return Place(own, of_ranks)

    def _put_inline(self, requests: Sequence[Request]) -> int:
        """The number of bytes; 0 where the tensors do not fit, -1 where there is nothing to send."""
        if not self._has_inline or not 0 < len(requests) <= INLINE_REQUESTS:
            return 0
        total = sum(_inline_bytes(request) for request in requests)
        if total > INLINE_BYTES:
            return 0
        if not total:
            return -1
        tensors = [tensor for request in requests for tensor in request.inputs]
        for place, tensor in zip(self.places(requests), tensors, strict=True):
            place.own.copy_(tensor.view(-1))
        return total


def _digest(requests: Sequence[Request]) -> int:
    if not requests:
        return 0
    first = requests[0].bucket
    return combined([digest(request.signature) + request.bucket - first for request in requests])


def _inline_bytes(request: Request) -> int:
    """More than fits for what cannot be sent inline."""
    signature = request.signature
    if not (signature.kind == "allreduce" and signature.op in _INLINE_OPS) and signature.kind not in ("broadcast", "barrier"):
        return INLINE_BYTES + 1
    if any(tensor.device.type != "cpu" for tensor in request.inputs):
        return INLINE_BYTES + 1
    return sum(_rounded(tensor) for tensor in request.inputs)


def _rounded(tensor: torch.Tensor) -> int:
    """Its bytes, in whole places of the block."""
    return -(-tensor.numel() * tensor.element_size() // _PLACES) * _PLACES


def outside_of_inference(function: Callable[P, T]) -> Callable[P, T]:
    """The function, outside of the caller's torch.inference_mode(): tensors that are made in that mode cannot be changed after it.

    What rounds keep from call to call has to be of use outside of it, too.
    """

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return outside
