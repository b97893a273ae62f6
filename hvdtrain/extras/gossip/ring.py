"""Gossip on a ring whose neighbours change: who sends to whom, and the strategy that does it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.stopwatch import Stopwatch
from hvdtrain.frameworks.torch.parallel.buckets import group
from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD
from hvdtrain.frameworks.torch.strategy import NamedParameters


class RingNeighbours(NamedTuple):
    """The ranks with which a rank exchanges weights once."""

    to: int
    source: int


def neighbours(rank: int, size: int, turn: int) -> RingNeighbours:
    """Returns the neighbours of a rank in exchange number `turn`, from 0, on two ranks or more.

    They are 2^(turn mod ceil(log2 size)) ranks away (the one-peer exponential graph: Ying 2021,
    arXiv:2110.13363). A rank takes the mean of its weights and those it receives, so the mean over
    all ranks does not change; if size is a power of two, log2(size) exchanges without a step
    between them give every rank the mean.
    """
    distance = 2 ** (turn % (size - 1).bit_length())
    return RingNeighbours((rank + distance) % size, (rank - distance) % size)


class GossipSteps(LocalSGD):
    """Gossip SGD with a periodic average over all ranks (Chen 2021, arXiv:2105.09080, alg. 1).

    Exchanges are counted from the last average, so they depend only on the step. The optimizer's
    state is averaged only with all ranks.
    """

    def __init__(
        self,
        named: NamedParameters,
        communicator: Communicator,
        local_steps: int,
        bucket_bytes: int,
        stopwatch: Stopwatch,
        gossip_steps: int,
    ) -> None:
        super().__init__(named, communicator, local_steps, bucket_bytes, stopwatch)
        self._gossip_steps = gossip_steps
        often = "step" if gossip_steps == 1 else f"{gossip_steps} steps"
        self.summary += f", gossip after every {often}"

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().optimizer_step(optimizer)
        # 0 after an average
        if self._steps and self._steps % self._gossip_steps == 0 and self._communicator.size > 1:
            self._stopwatch.enter("communication")
            self._exchange(self._steps // self._gossip_steps - 1)
            self._stopwatch.enter("update")

    @torch.no_grad()
    def _exchange(self, turn: int) -> None:
        ranks: Any = self._communicator
        to, source = neighbours(ranks.rank, ranks.size, turn)
        exchanges = []
        for i, bucket in enumerate(group([("", p) for p in self._trained], self._bucket_bytes)):
            own = torch.cat([p.reshape(-1) for p in bucket])
            sent = own.cpu()  # engines send from host memory
            received = ranks.start_recv(torch.empty_like(sent), source, f"gossip.{i}")
            sending = ranks.start_send(sent, to, f"gossip.{i}")
            exchanges.append((bucket, own, received, sending))
        for bucket, own, received, sending in exchanges:
            other = received.wait().to(own.device)
            sending.wait()
            means = ((own + other) / 2).split([p.numel() for p in bucket])
            for p, mean in zip(bucket, means, strict=True):
                p.copy_(mean.view(p.shape))
