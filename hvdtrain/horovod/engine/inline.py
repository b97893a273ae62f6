"""Results of small tensors that came with the headers: every rank computes them from all ranks' values, in the order of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.horovod.engine.block import Block, Place
from hvdtrain.horovod.engine.perform import finish_reduction_
from hvdtrain.horovod.engine.reduce import combine
from hvdtrain.horovod.engine.requests import Request
from hvdtrain.horovod.engine.scale import scale_


def finish_inline(block: Block, requests: Sequence[Request], ranks: Sequence[int]) -> None:
    """ranks: of the job, those of the set."""
    places = iter(block.places(requests))
    for request in requests:
        results = []
        for index, tensor in enumerate(request.inputs):
            value = _result(request, next(places), ranks).view(tensor.shape)
            results.append(request.outputs[index].copy_(value) if request.outputs else value)
        request.finish(results)


def _result(request: Request, place: Place, ranks: Sequence[int]) -> torch.Tensor:
    """In memory of its own."""
    signature = request.signature
    if signature.kind == "broadcast":
        return place.of_ranks[ranks.index(signature.root)].clone()
    parts = place.of_ranks
    if signature.prescale != 1.0:
        parts = [part.clone() for part in parts]
        for part in parts:
            scale_(part, signature.prescale)
    op = "sum" if signature.op == "average" else signature.op
    total = parts[0].clone() if len(parts) == 1 else combine(op, parts[0], parts[1])
    for part in parts[2:]:
        combine(op, total, part, total)
    finish_reduction_(total, signature.op, len(parts), signature.postscale)
    return total
