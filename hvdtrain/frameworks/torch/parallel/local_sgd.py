"""comm.local_steps: ranks step apart for some steps, then meet in the mean of their weights and optimizer slots."""

from __future__ import annotations

from typing import Any

import torch

from hvdtrain.comm.communicator import Communicator
from hvdtrain.frameworks.torch.parallel.buckets import group
from hvdtrain.frameworks.torch.parallel.strategy import Named, fill_missing, reduction_device


class LocalSGD:
    """Local SGD (Stich 2019, arXiv:1805.09767, alg. 1) for every optimizer: its floating slots are averaged with the weights.

    A rank learns from the mean over its own samples of a step. The ranks average after `every` steps, and wherever the job needs them
    equal: log.every_steps, a checkpoint, an evaluation.
    """

    wrapped = None
    local_mean = True

    def __init__(self, named: Named, communicator: Communicator, every: int, bucket_bytes: int) -> None:
        self._named, self._engine, self._every, self._bytes = named, communicator, every, bucket_bytes
        self._parameters = [p for _, p in named]
        self._since = 0  # steps since the ranks were equal
        self.words = f"{every} local steps between averages"

    def begin(self, passes: int) -> None:
        pass

    def last_pass(self) -> None:
        pass

    def finish(self) -> None:
        fill_missing(self._parameters)

    def apply(self, optimizer: Any) -> None:
        optimizer.step()

    def stepped(self, optimizer: Any) -> None:
        """Once in each step, whether its update was left out or not: every rank calls it."""
        self._since += 1
        if self._since == self._every:
            self.average(optimizer)

    @torch.no_grad()
    def average(self, optimizer: Any) -> None:
        """The mean over ranks, where they have stepped apart. Every rank calls it."""
        if not self._since:
            return
        self._since = 0
        tensors = [torch.nn.Parameter(t.data, requires_grad=False) for t in self._live(optimizer)]
        handles = []
        for i, some in enumerate(group([("", t) for t in tensors], self._bytes)):
            flat = torch.cat([t.reshape(-1) for t in some]).to(reduction_device(some[0].device, self._engine)) / self._engine.size
            handles.append((some, self._engine.start_allreduce(flat, f"average.{i}")))
        for some, handle in handles:
            parts = handle.wait().to(some[0].device).split([t.numel() for t in some])
            torch._foreach_copy_([t.data for t in some], [part.view(t.shape) for t, part in zip(some, parts, strict=True)])

    def _live(self, optimizer: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = list(self._parameters)
        for p in self._parameters:
            entries = sorted(optimizer.state.get(p, {}).items())
            found += [t for key, t in entries if key != "step" and torch.is_tensor(t) and t.is_floating_point()]  # steps are alike
        return found
