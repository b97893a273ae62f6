"""What a rank that has joined gives to the requests of the others: nothing that changes their results."""

from __future__ import annotations

import torch

from hvdtrain.horovod.engine.reduce import neutral
from hvdtrain.horovod.engine.requests import ANY, Request, Signature


def stand_in(signature: Signature, size: int) -> Request:
    """size: ranks of the set."""
    inputs = []
    for dtype_name, shape, device in zip(signature.dtypes, signature.shapes, signature.devices, strict=True):
        dtype = getattr(torch, dtype_name)
        lengths = [0 if length == ANY else length for length in shape]
        value = neutral(signature.op, dtype) if signature.kind in ("allreduce", "reducescatter") else 0
        inputs.append(torch.full(lengths, value, dtype=dtype, device=device))
    request = Request(signature, inputs, splits=[0] * size if signature.kind == "alltoall" else ())
    request.is_stand_in = True
    return request
