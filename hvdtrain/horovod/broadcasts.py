"""broadcast and its forms."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.handles import synchronize
from hvdtrain.horovod.job import JOB
from hvdtrain.horovod.ops import Average
from hvdtrain.horovod.process_sets import ProcessSet, global_process_set
from hvdtrain.horovod.reductions import allreduce
from hvdtrain.horovod.start import Call
from hvdtrain.horovod.tensors import own


def broadcast_async(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Begins to send the tensor of rank `root_rank` (of the job, also in a process set) to all; synchronize() gives a new tensor."""
    return _start(Call("broadcast", tensor, name, process_set), root_rank, process_set)


def broadcast_async_(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """A broadcast_async() into the tensor itself."""
    return _start(Call("broadcast", tensor, name, process_set, in_place=True), root_rank, process_set)


def _start(call: Call, root: int, process_set: ProcessSet) -> int:
    ranks = JOB.engine.ranks_of(process_set.process_set_id) if process_set.process_set_id is not None else []
    if ranks and root not in ranks:
        raise BadCall(f"invalid root rank {root} for the process set of ranks {ranks[:16]}", call.where, "one of these ranks")
    return call.start(root=int(root))


def broadcast_(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """A broadcast() into the tensor itself."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast(tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """The tensor of rank `root_rank` on every rank. Gradients go through it."""
    if isinstance(tensor, torch.Tensor) and tensor.requires_grad and torch.is_grad_enabled():
        return _Broadcast.apply(tensor, root_rank, name, process_set)
    return synchronize(broadcast_async(tensor, root_rank, name, process_set))


class _Broadcast(torch.autograd.Function):
    """The gradient of the root is the average of all, as Horovod's is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Any:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        return own(synchronize(broadcast_async(tensor, root_rank, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        found = allreduce(grads[0], op=Average, process_set=ctx.process_set)
        is_root = torch.tensor(JOB.engine.rank == ctx.root_rank, device=found.device)
        return torch.where(is_root, found, torch.zeros_like(found)), None, None, None  # with a gradient of its own on every rank
