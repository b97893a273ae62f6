"""comm.local_from: gradients are reduced in each step up to a point of the job, then each rank steps by itself as in local SGD."""

from __future__ import annotations

import torch

from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.torch.parallel.buckets import Buckets
from hvdtrain.frameworks.torch.parallel.local_sgd import LocalSGD
from hvdtrain.frameworks.torch.parallel.strategy import Around, Held


class PostLocalSGD(Around):
    """Post-local SGD (Lin et al. 2018, arXiv:1808.07217, section 3): the step's `hyper` says which of two strategies makes it.

    Both leave the optimizer as it is, so its state goes on where they change, and no rank has to be told of it.
    """

    def __init__(self, together: Buckets, apart: LocalSGD, begins: str) -> None:
        """begins: the local steps, in words."""
        super().__init__(together)
        self._together, self._apart = together, apart
        self.summary = f"{together.summary}; from {begins} on {apart.summary}"

    def begin_step(self, hyper: Hyper) -> None:
        self._within = self._together if hyper.together else self._apart
        self.local_mean = self._within.local_mean

    def weights_changed(self) -> None:
        self._together.weights_changed()
        self._apart.weights_changed()

    def sync(self, optimizer: torch.optim.Optimizer) -> None:
        self._apart.sync(optimizer)

    def held(self) -> Held:
        return self._together.held()
