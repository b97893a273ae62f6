"""A job on torchdist in which one rank has NCCL, as if hosts with and without a GPU train
together."""

from __future__ import annotations

from hvdtrain.comm import torchdist
from hvdtrain.comm.communicator import Communicator, elastic
from hvdtrain.errors import UserError


def ready(ranks: Communicator, gpu: bool) -> str:
    """What be_ready_to_shrink() raises on this rank; rank 1 reports NCCL."""
    before = torchdist.has_nccl
    torchdist.has_nccl = lambda: ranks.rank == 1
    try:
        elastic(ranks, "guard.lost").be_ready_to_shrink(gpu)
        return ""
    except UserError as error:
        return error.what
    finally:
        torchdist.has_nccl = before
