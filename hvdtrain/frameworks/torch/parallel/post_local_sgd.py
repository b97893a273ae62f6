"""comm.local_from: gradients are reduced in each step up to a point of the job, then each rank steps by itself as in local SGD."""

from __future__ import annotations

from collections.abc import Sequence, Sized

import torch

from hvdtrain.core.metrics import Sums
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.torch.parallel.buckets import Buckets
from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD
from hvdtrain.frameworks.torch.parallel.strategy import Held, OnePass, Replicated, Wrapped


class PostLocalSGD(Replicated):
    """Post-local SGD (Lin et al. 2018, arXiv:1808.07217, section 3): the step's `hyper` says which of two strategies makes it.

    Both leave the optimizer as it is, so its state goes on where they change, and no rank has to be told of it.
    """

    waits_in_passes = False

    def __init__(self, together: Buckets, apart: LocalSGD, begins: str) -> None:
        """begins: the local steps, in words."""
        self._together, self._apart = together, apart
        self._now: Buckets | LocalSGD = together
        self.local_mean = False  # in this step
        self.summary = f"{together.summary}; from {begins} on {apart.summary}"

    @property
    def equal_ranks(self) -> int:
        return self._now.equal_ranks

    def begin_step(self, hyper: Hyper) -> None:
        self._now = self._together if hyper.together else self._apart
        self.local_mean = self._now.local_mean

    def wrap(self, forward: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Wrapped:
        return Wrapped(forward, optimizer)

    def run(self, micro: Sequence[Sized], divisor: int, one_pass: OnePass) -> Sums:
        return self._now.run(micro, divisor, one_pass)

    def reduce(self) -> None:
        self._now.reduce()

    def optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._now.optimizer_step(optimizer)

    def weights_changed(self) -> None:
        self._together.weights_changed()
        self._apart.weights_changed()

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        self._apart.sync(optimizer)

    def held(self) -> Held:
        return self._together.held()
