"""Copies rank 0's numbers into the tensors of all ranks. If ranks have computed the same numbers,
for example from one seed, they exchange only digests."""

from __future__ import annotations

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.comm.mesh import Mesh
from hvdtrain.comm.on_all_ranks import same_on_all_ranks
from hvdtrain.core.arrays import digests
from hvdtrain.frameworks.torch.private_api import FakeTensor


@torch.no_grad()
def as_on_rank_0(
    tensor: torch.Tensor, communicator: Communicator, *, is_used: bool = True
) -> torch.Tensor:
    """Returns the tensor, with the numbers of rank 0's. A collective.

    is_used: false on a rank that does not need the numbers; its tensor may be a meta tensor.
    Without numbers, as in a plan, the tensor itself.
    """
    if communicator.size == 1 or not tensor.numel() or isinstance(tensor, FakeTensor):
        return tensor
    (is_same,) = same_on_all_ranks(communicator, [_digest(tensor) if is_used else None])
    if is_same:
        return tensor
    if tensor.is_meta:
        tensor = torch.empty_like(tensor, device="cpu")
    # a GPU's memory, if the engine supports it
    on_device = "device_memory" in communicator.features
    sent = _bytes_of(tensor.detach() if on_device else tensor.detach().cpu())
    found = communicator.broadcast(sent, "weights")
    return found.view(tensor.dtype).view(tensor.shape).to(tensor.device)


def _digest(tensor: torch.Tensor) -> int:
    return digests([("", _bytes_of(tensor.cpu()).numpy())])[""]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def take_from_rank_0(model: torch.nn.Module, mesh: Mesh) -> None:
    """Gives every rank the weights and buffers that rank 0's model has, before it keeps a part of
    them. A collective."""
    for tensor in (*model.parameters(), *model.buffers()):
        found = as_on_rank_0(tensor, mesh.world)
        if found is not tensor:
            tensor.copy_(found)
