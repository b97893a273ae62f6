"""Tensors in host memory between each two ranks of a communicator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvdtrain.comm.communicator import Communicator, point_to_point

TAG = 22  # of its messages


def swap(communicator: Communicator, mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], name: str) -> None:
    """mine[r] to rank r; theirs[r], which is contiguous, takes what rank r sends. Of this rank both may be the same memory."""
    rank = communicator.rank
    if theirs[rank].data_ptr() != mine[rank].data_ptr():
        theirs[rank].copy_(mine[rank])
    others = [other for other in range(communicator.size) if other != rank]
    if not others:
        return
    wire = point_to_point(communicator, f"messages of {name!r}")
    handles = [wire.start_recv(as_bytes(theirs[other].view(-1)), other, name, TAG) for other in others if theirs[other].numel()]
    handles += [wire.start_send(as_bytes(mine[other].reshape(-1)), other, name, TAG) for other in others if mine[other].numel()]
    for handle in handles:
        handle.wait()


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """A view, of a contiguous tensor of one dimension."""
    if not flat.numel():
        return flat.new_empty(0, dtype=torch.uint8)
    if flat.stride(0) != 1:  # of one number, as of a row of a transposed tensor: any stride is contiguous then
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
