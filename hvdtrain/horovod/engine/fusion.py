"""Tensor fusion: which requests share a collective, and which tensors a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdtrain.horovod.engine.requests import Request, Signature

ALONE_BYTES = (
    1 << 20
)  # a tensor of so many is moved where it is: two copies would cost more than a collective of its own  # noqa: E501
# their sizes differ over ranks, so that nothing may depend on them
_ANY_ROWS = (
    "allgather",
    "alltoall",
)


class RequestTensor(NamedTuple):
    """One tensor of a request."""

    request: Request
    place: int  # in the request
    source: torch.Tensor

    def target(self) -> torch.Tensor | None:
        """The caller's tensor that receives the result, if there is one."""
        return self.request.outputs[self.place] if self.request.outputs else None


class Batch(NamedTuple):
    """Units that share one collective."""

    signature: Signature  # of the first; the others have its kind, op, factors and root
    units: list[RequestTensor]
    # ranks that asked for it: an average is over these, and not over those that have joined
    givers: int


def batches(requests: Sequence[tuple[Request, tuple[int, ...]]], fusion_bytes: int) -> list[Batch]:
    """In the order of their first units, which is the same on every rank. requests: each with the
    buckets that it has on the ranks.

    Only requests of one bucket on every rank share a batch: a bucket ends where its rank waits, so
    that batches do not depend on the time at which ranks come to an agreement.
    """
    made: list[Batch] = []
    last: dict[
        tuple[object, ...], tuple[list[RequestTensor], int]
    ] = {}  # what can be fused -> its newest batch, the bytes of that
    for request, buckets in requests:
        signature = request.signature
        kind = signature.kind
        op = signature.op
        key = kind, op, signature.root, signature.prescale, signature.postscale, buckets
        for place, source in enumerate(request.inputs):
            unit = RequestTensor(request, place, source)
            size = 0 if kind in _ANY_ROWS else source.nbytes
            if op == "adasum" or size >= ALONE_BYTES:
                made.append(Batch(signature, [unit], len(buckets)))
                continue
            whole = *key, source.dtype, source.device
            units, so_far = last.get(whole, (None, 0))
            if units is None or so_far + size > fusion_bytes:
                units = []
                so_far = 0
                made.append(Batch(signature, units, len(buckets)))
            units.append(unit)
            last[whole] = units, so_far + size
    return made


def runs(sizes: Sequence[int], fusion_bytes: int) -> list[tuple[int, int]]:
    """(first, end) of each group of tensors that travel together, from their sizes in order."""
    ranges: list[tuple[int, int]] = []
    so_far = fusion_bytes
    for place, size in enumerate(sizes):
        if size < ALONE_BYTES and so_far + size <= fusion_bytes and ranges:
            ranges[-1] = ranges[-1][0], place + 1
            so_far += size
        else:
            ranges.append((place, place + 1))
            so_far = size if size < ALONE_BYTES else fusion_bytes
    return ranges
