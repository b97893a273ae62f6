"""Recipe: every number of one step, as a pure function of progress."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.recipe.schedule import Schedule
from hvdtrain.state import Hyper, Progress


@dataclass(frozen=True)
class Recipe:
    """What the step after `progress` uses, on every rank alike."""

    lr: Schedule
    momentum: float
    weight_decay: float
    batch: int  # samples over all ranks

    def at(self, progress: Progress) -> Hyper:
        return Hyper(lr=self.lr(progress.epochs), momentum=self.momentum, weight_decay=self.weight_decay, batch=self.batch)
