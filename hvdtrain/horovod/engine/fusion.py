"""Tensor fusion: which requests share a collective, and which tensors a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdtrain.horovod.engine.requests import Request, Signature

ALONE_BYTES = (
    1 << 20
    # bytes from which a tensor is sent in place: two copies would take longer than a separate
    # collective
)
# their sizes differ between ranks, so nothing may depend on them
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
        """Returns the caller's tensor that receives the result, if any."""
        return self.request.outputs[self.place] if self.request.outputs else None


class Batch(NamedTuple):
    """Units that share one collective."""

    # signature of the first; the others have the same kind, op, factors and root
    signature: Signature
    units: list[RequestTensor]
    # number of ranks that requested it; an average is over these, and excludes joined ranks
    givers: int


def batches(requests: Sequence[tuple[Request, tuple[int, ...]]], fusion_bytes: int) -> list[Batch]:
    """Returns batches in the order of their first units, which is the same on every rank. requests:
    each with its buckets on the ranks.

    Only requests in the same bucket on every rank share a batch. A bucket ends where its rank
    waits, so batches do not depend on the time at which ranks agree.
    """
    made: list[Batch] = []
    last: dict[
        tuple[object, ...], tuple[list[RequestTensor], int]
    ] = {}  # fusion key -> its newest batch and the bytes in it
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
    """Returns (first, end) of each group of tensors that are sent together, from their sizes in
    order."""
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
