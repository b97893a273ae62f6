"""Which tensors of the requests that are ready travel together: those of one kind, dtype and bucket, up to the size of a fusion buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdtrain.horovod.engine.requests import Request, Signature


class Unit(NamedTuple):
    """One tensor of a request."""

    request: Request
    place: int  # in the request

    @property
    def source(self) -> torch.Tensor:
        return self.request.inputs[self.place]

    @property
    def size_bytes(self) -> int:
        return self.source.numel() * self.source.element_size()

    def target(self) -> torch.Tensor | None:
        """Whose memory takes the result, where the caller has given it."""
        return self.request.outputs[self.place] if self.request.outputs else None


class Batch(NamedTuple):
    """Units that one collective takes."""

    signature: Signature  # of the first; the others have its kind, op, factors and root
    units: list[Unit]


def batches(requests: Sequence[tuple[Request, tuple[int, ...]]], fusion_bytes: int) -> list[Batch]:
    """In the order of their first units, which is the same on every rank. requests: each with the buckets that it has on the ranks.

    Only requests of one bucket on every rank share a batch: a bucket ends where its rank waits, so that batches do not depend on the time
    at which ranks come to an agreement.
    """
    found: list[Batch] = []
    last: dict[tuple[object, ...], tuple[int, int]] = {}  # what can be fused -> number of its newest batch, its bytes
    for request, buckets in requests:
        signature = request.signature
        for place in range(len(request.inputs)):
            unit = Unit(request, place)
            key = (_key(signature), signature.dtypes[place], unit.source.device, buckets)
            number, size = last.get(key, (-1, 0))
            if number < 0 or size + unit.size_bytes > fusion_bytes or signature.op == "adasum":
                number, size = len(found), 0
                found.append(Batch(signature, []))
            found[number].units.append(unit)
            last[key] = number, size + unit.size_bytes
    return found


def _key(signature: Signature) -> tuple[object, ...]:
    return signature.kind, signature.op, signature.root, signature.prescale, signature.postscale
