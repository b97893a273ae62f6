"""The connection of a rank with the ranks that have other positions of its samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hvdtrain.comm.communicator import Handle, PointToPoint, SingleProcessCommunicator
from hvdtrain.comm.order import SameOrder
from hvdtrain.frameworks.stopwatch import ReplaceableStopwatch
from hvdtrain.frameworks.torch.private_api import in_backward

# Tags of messages: between two ranks, those with one tag arrive in the order in which they are sent
ACTIVATIONS = 3
GRADIENTS = 4  # of keys and values on their way back
Shapes = Sequence[tuple[int, ...]]


class ContextLink(NamedTuple):
    """The messages between the ranks that divide the positions of a sample. On a GPU, tensors go
    through host memory."""

    ranks: PointToPoint
    order: SameOrder | None = None  # checks that these ranks compute layers in the same order
    stopwatch: ReplaceableStopwatch | None = None

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    def alone(self) -> ContextLink:
        """Returns the link of a rank that has all positions."""
        found: Any = SingleProcessCommunicator()
        return ContextLink(found)

    def begin(self, layer: str, direction: str) -> None:
        """Announces the messages of a layer, after every rank has reached it."""
        if self.order is None:
            return
        doing = "recomputation" if direction == "forward" and in_backward() else f"{direction} pass"
        self.order.ask(f"{doing} of {layer}")
        self.order.at = f"{doing} of {layer}"

    def end(self, doing: str) -> None:
        """Checks that no rank computes more layers in this pass than others."""
        if self.order is not None:
            self.order.end(doing, backward_follows=torch.is_grad_enabled())

    def start_send(
        self, tensors: Sequence[torch.Tensor], to: int, name: str, tag: int = ACTIVATIONS
    ) -> Handle:
        """Starts to send tensors of one dtype as one message. They are copied."""
        flat = torch.cat([x.detach().reshape(-1) for x in tensors]).cpu()
        return self.ranks.start_send(flat, to, name, tag)

    def start_recv(
        self,
        shapes: Shapes,
        like: torch.Tensor,
        source: int,
        name: str,
        tag: int = ACTIVATIONS,
    ) -> Callable[[], list[torch.Tensor]]:
        """Starts to receive tensors with these shapes, and the dtype and device of `like`; returns
        the function that waits for them."""
        sizes = [torch.Size(shape).numel() for shape in shapes]
        with torch.inference_mode(False):
            flat = torch.empty(sum(sizes), dtype=like.dtype, device=like.device).cpu()
        handle = self.ranks.start_recv(flat, source, name, tag)

        def wait() -> list[torch.Tensor]:
            self.wait(handle)
            parts = flat.to(like.device).split(sizes)
            return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

        return wait

    def wait(self, handle: Handle) -> None:
        """Waits for a message; on a CPU, this counts as communication in the times of a step."""
        if self.stopwatch is None:
            handle.wait()
            return
        with self.stopwatch.communicating():
            handle.wait()

    def sum(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Returns the sum over the ranks; may overwrite x."""
        device = x.device if "device_memory" in self.ranks.features else torch.device("cpu")
        with torch.inference_mode(False):
            found: torch.Tensor = self.ranks.allreduce(x.to(device).contiguous(), name)
        return found.to(x.device)
