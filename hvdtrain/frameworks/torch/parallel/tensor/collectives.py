"""What crosses the ranks of a tensor group in forward and in backward passes: the operators f and g of Shoeybi et al. 2019, figure 3."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from hvdtrain.comm.communicator import Communicator, part_of
from hvdtrain.comm.same_order import SameOrder

_PASSES = {"forward": "forward pass", "backward": "backward pass", "again": "gathering for the backward pass"}


def in_backward() -> bool:
    """Whether a backward pass is under way in this thread: a forward pass is another one's again, then."""
    return torch._C._current_graph_task_id() != -1


class Positions:
    """How many positions the samples have that are computed now; a rank has its part of them, and may need the number of all."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def part(self, communicator: Communicator) -> slice:
        """Positions of a rank: the first ranks have one more where they do not divide."""
        return part_of(self.count, communicator.rank, communicator.size)


class Link(NamedTuple):
    """A layer's connection with the other ranks of its tensor group."""

    communicator: Communicator
    layer: str  # its name in the model, of which the lasting names of its collectives are made
    positions: Positions | None = None  # with sequence parallelism (layers.py)
    order: SameOrder | None = None  # in which these ranks compute layers

    def name_of(self, direction: str) -> str:
        """The lasting name of a collective that follows, once every rank has come to it."""
        if self.order:
            again = direction == "forward" and in_backward()
            doing = f"{'recomputation' if again else _PASSES.get(direction, direction)} of {self.layer}"
            self.order.ask(doing)
            self.order.at = doing
        return f"tensor.{self.layer}.{direction}"

    def sum(self, x: torch.Tensor, direction: str) -> torch.Tensor:
        """The sum over ranks; it may overwrite x."""
        with torch.inference_mode(False):
            found = self.communicator.allreduce(self.ready(x.detach().to(self.sum_dtype(x))), self.name_of(direction))
        return found.to(x.device, x.dtype)

    def gather(self, x: torch.Tensor, direction: str) -> torch.Tensor:
        """x of every rank along axis 0, in rank order; the lengths of axis 0 may differ."""
        dtype = torch.int16 if x.dtype == torch.bfloat16 else x.dtype  # no engine moves bfloat16 by its name
        with torch.inference_mode(False):
            mine = self.ready(x.detach()).view(dtype)
            found = self.communicator.allgather(mine, self.name_of(direction))
        return found.view(x.dtype).to(x.device)

    def sum_dtype(self, x: torch.Tensor) -> torch.dtype:
        """In which the engine adds up numbers of x's type."""
        return torch.float32 if x.dtype == torch.bfloat16 and "bfloat16_sums" not in self.communicator.features else x.dtype

    def device_of(self, x: torch.Tensor) -> torch.device:
        """Where the engine takes x."""
        return x.device if "device_memory" in self.communicator.features else torch.device("cpu")

    def ready(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor as engines take it: contiguous, on the host or the device, and not of inference mode, to which Horovod's thread may
        not write."""
        x = x.clone() if x.is_inference() else x
        return x.to(self.device_of(x)).contiguous()


def copy_to_ranks(x: torch.Tensor, link: Link) -> torch.Tensor:
    """f: x itself, which every rank has; its gradient is the sum over ranks, since each rank's layers are a part of what it goes through.

    The gradient that comes back may be overwritten: only a layer that makes it anew may take the result.
    """
    found: torch.Tensor = _CopyToRanks.apply(x, link)
    return found


def sum_over_ranks(x: torch.Tensor, link: Link) -> torch.Tensor:
    """g: the sum of the ranks' x, which may be overwritten; its gradient goes to each of them."""
    found: torch.Tensor = _SumOverRanks.apply(x, link)
    return found


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: Link) -> torch.Tensor:
        ctx.link = link
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.link.sum(dy, "backward"), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, link: Link) -> torch.Tensor:
        return link.sum(x, "forward")

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy, None
