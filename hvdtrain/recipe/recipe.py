"""Recipe: learning rate, batch, momentum and noise of a step, as a pure function of progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hvdtrain.core.metrics import Better
from hvdtrain.core.progress import Hyper, Progress
from hvdtrain.recipe.batch import Growth
from hvdtrain.recipe.noise import noise_variance
from hvdtrain.recipe.plateau import Plateau, PlateauRule
from hvdtrain.recipe.schedules import Schedule

Scale = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class Recipe:
    """Learning rate, batch and noise of each step, equal on every rank."""

    lr: Schedule  # for the first batch size
    batch: Growth  # samples over all ranks
    momentum: float
    weight_decay: float
    epochs: float  # epochs of the job; infinity if only time ends it
    lr_follows_batch: Scale = "none"  # how the rate scales when the batch grows
    base_batch: int = 1  # global batch whose gradient noise sample_noise=1 reproduces
    sample_noise: float = 0.0
    gradient_noise: float = 0.0
    local_from: float = 0.0  # epochs done where comm.local_steps begins
    plateau: PlateauRule | None = None  # the rule of recipe.schedule=plateau
    momentum_cycle: Schedule | None = None  # instead of `momentum`
    thaw: tuple[int, ...] = ()  # see Hyper.thaw

    def at(self, progress: Progress) -> Hyper:
        """Returns the numbers of the step that follows `progress`."""
        batch = self.batch(progress.epochs)
        return Hyper(
            lr=self.lr(progress.epochs) * scaling(self.lr_follows_batch, batch, self.batch.first),
            momentum=self.momentum
            if self.momentum_cycle is None
            else self.momentum_cycle(progress.epochs),
            weight_decay=self.weight_decay,
            batch=batch,
            step=progress.step,
            noise=noise_variance(self.gradient_noise, progress.step),
            sample_noise=math.sqrt(self.sample_noise * max(0.0, batch / self.base_batch - 1.0)),
            thaw=self.thaw,
            together=progress.epochs < self.local_from,
        )

    def after_evaluations(self, hyper: Hyper, state: Plateau) -> Hyper:
        """Returns the numbers of a step from at(), adjusted by the evaluations before it."""
        return hyper if self.plateau is None else hyper._replace(lr=hyper.lr * state.share)

    def judge(self, state: Plateau, progress: Progress, value: float, better: Better) -> Plateau:
        """Returns the state after an evaluation with this value of the objective."""
        return (
            state
            if self.plateau is None
            else self.plateau.after(state, progress.epochs, value, better)
        )


def scaling(scale: Scale, batch: int, base_batch: int) -> float:
    """Returns the factor for a learning rate that is meant for base_batch.

    linear: batch / base_batch (Goyal et al. 2017, arXiv:1706.02677, 2.1). sqrt: its square root
    (Krizhevsky 2014, arXiv:1404.5997, 5.1).
    """
    if scale == "none":
        return 1.0
    return batch / base_batch if scale == "linear" else math.sqrt(batch / base_batch)
