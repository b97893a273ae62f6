"""Ranges: the position of each parameter in flat buckets, and each server's part of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvdtrain.comm.communicator import Communicator, part_of
from hvdtrain.frameworks.torch.parallel.buckets import group
from hvdtrain.frameworks.torch.strategy import NamedParameters, Shard, reduction_device


class Slot(NamedTuple):
    """A parameter in its bucket."""

    bucket: int
    begin: int  # position of its first element


class Ranges:
    """Ranges of the weights, equal on all ranks. Buckets are ordered from the last layer to the
    first, as backward fills them. Each server has a contiguous part of every bucket, and stores its
    parts contiguously in one flat array.
    """

    def __init__(self, named: NamedParameters, bucket_bytes: int, servers: int) -> None:
        self.servers = servers
        self.buckets = group(named, bucket_bytes)
        dtypes = {p.dtype for _, p in named}
        assert len(dtypes) == 1, f"weights of one type, not {dtypes}"
        self.lengths = [sum(p.numel() for p in bucket) for bucket in self.buckets]
        self.slots: dict[torch.nn.Parameter, Slot] = {}
        for i, bucket in enumerate(self.buckets):
            begin = 0
            for p in bucket:
                self.slots[p] = Slot(i, begin)
                begin += p.numel()

    def part(self, bucket: int, server: int) -> slice:
        """Returns a server's part of a bucket."""
        return part_of(self.lengths[bucket], server, self.servers)

    def length(self, server: int) -> int:
        """Returns the length of a server's flat memory."""
        return sum(
            part.stop - part.start
            for part in (self.part(i, server) for i in range(len(self.buckets)))
        )

    def split(self, own: torch.Tensor, server: int) -> list[torch.Tensor]:
        """Returns the part of each bucket in a server's flat memory."""
        parts = [self.part(i, server) for i in range(len(self.buckets))]
        return list(own.split([part.stop - part.start for part in parts]))

    def shard(self, p: torch.nn.Parameter, own: torch.Tensor, server: int) -> Shard:
        """Returns the part of a parameter in a server's flat array."""
        slot = self.slots[p]
        n = p.numel()
        part = self.part(slot.bucket, server)
        start = min(max(part.start - slot.begin, 0), n)
        stop = min(max(part.stop - slot.begin, start), n)
        flat = self.split(own, server)[slot.bucket]
        first = slot.begin + start - part.start if stop > start else 0
        return Shard(torch.nn.Parameter(flat[first : first + stop - start]), p, start, stop)


class Weights:
    """The whole model's weights on a rank. The parameters are views of its buckets."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = ranges
        with torch.no_grad():
            self.flat = [
                torch.cat([p.detach().reshape(-1) for p in bucket]) for bucket in ranges.buckets
            ]
        for p, slot in ranges.slots.items():
            p.data = self.flat[slot.bucket][slot.begin : slot.begin + p.numel()].view(p.shape)

    def parts_of_server(self, server: int) -> list[torch.Tensor]:
        """Returns views of a server's part of each bucket."""
        return [flat[self._ranges.part(i, server)] for i, flat in enumerate(self.flat)]

    @torch.no_grad()
    def broadcast(self, communicator: Communicator) -> None:
        """Gives every rank each server's part, which the server has here already. A collective."""
        for server in range(self._ranges.servers):
            for i, part in enumerate(self.parts_of_server(server)):
                if part.numel():
                    device = reduction_device(part.device, communicator)
                    found = communicator.broadcast(
                        part.to(device), f"weights.{server}.{i}", root=server
                    )
                    if found is not part:
                        part.copy_(found)


@torch.no_grad()
def broadcast_numbers(
    communicator: Communicator,
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
) -> None:
    """Broadcasts optimizer state that is one number for a parameter from the first server. A
    collective."""
    numbers = [
        t
        for p in parameters
        for _, t in sorted(optimizer.state[p].items())
        if torch.is_tensor(t) and not t.ndim
    ]
    if numbers:
        found = communicator.broadcast(torch.stack(numbers).cpu(), "numbers of the optimizer")
        torch._foreach_copy_(numbers, list(found.to(numbers[0].device).unbind()))
