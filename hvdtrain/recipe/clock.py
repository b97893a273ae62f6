"""Ends of the job and of the recipe's lengths, in epochs. They depend only on the configuration and
the size of the data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from hvdtrain.config.schema import Config
from hvdtrain.core.lengths import Length
from hvdtrain.core.progress import ENDLESS
from hvdtrain.errors import UserError
from hvdtrain.recipe.batch import Growth, samples_after, steps_before


@dataclass(frozen=True)
class Clock:
    """Converts lengths to epochs, the unit of every schedule.

    Steps have the recipe's batches and are counted from the beginning of the job; a sample has
    `context` tokens. A share of the job is a share of its steps if stop.steps ends it, else of its
    epochs. It is known before the first step, so each step's rate depends only on its position. A
    job that stop.time ends has no shares.
    """

    dataset: int  # samples in an epoch
    context: int | None  # tokens in a sample; None if samples have no tokens
    multiplier: int  # factor on counts of epochs: epoch_multiplier()
    epochs: float | None  # epochs of the job; None if something else ends it
    steps: int | None  # steps of the job; None if something else ends it

    def after(self, begin: float, length: Length, growth: Growth, where: str) -> float:
        """Returns the epochs done at the end of a `length` that starts at `begin`. where: the key
        and where it was set, for a message.

        Raises UserError for a length in tokens if samples have no tokens.
        """
        amount = length.amount
        match length.unit:
            case "epochs":
                return begin + amount * self.multiplier
            case "samples":
                return begin + amount / self.dataset
            case "tokens":
                if self.context is None:
                    what = (
                        f"a length of {length.words()} needs samples that all have the same "
                        "number of tokens"
                    )
                    raise UserError(
                        what,
                        where,
                        "epochs, steps, samples or a share of the job; or task.name=language",
                    )
                return begin + amount / (self.context * self.dataset)
            case "steps":
                return self._after_steps(begin, amount, growth)
        if self.steps is not None and self._steps_end_it(growth):
            return self._after_steps(begin, self.steps * amount / 100, growth)
        assert self.epochs is not None, "refused by recipe/conflicts.py"
        return begin + self.epochs * amount / 100

    def end(self, growth: Growth) -> float:
        """Returns the end of the job in epochs; infinity if only time ends it."""
        if self.steps is not None and self._steps_end_it(growth):
            return self._after_steps(0.0, self.steps, growth)
        return math.inf if self.epochs is None else float(self.epochs)

    def _steps_end_it(self, growth: Growth) -> bool:
        assert self.steps is not None
        return self.epochs is None or self._after_steps(0.0, self.steps, growth) < self.epochs

    def _after_steps(self, begin: float, steps: float, growth: Growth) -> float:
        return (
            samples_after(steps_before(begin, growth, self.dataset) + steps, growth, self.dataset)
            / self.dataset
        )


def clock(config: Config, dataset: int, context: int | None = None) -> Clock:
    """Returns the clock of a job on `dataset` training samples of `context` tokens."""
    return Clock(
        dataset, context, epoch_multiplier(config), total_epochs(config), config.stop.steps
    )


def epoch_multiplier(config: Config) -> int:
    """Returns the factor on every count of epochs. With recipe.adapt_regime, a job makes as many
    updates as with base_batch.

    Hoffer et al. 2017, arXiv:1705.08741, section 5, multiply every count of epochs by ceil(B /
    128); here it is ceil(B / base_batch).
    """
    if not config.recipe.adapt_regime:
        return 1
    return -(-config.batch.size // base_batch(config))


def base_batch(config: Config) -> int:
    """Returns the global batch that optim.base_lr is meant for."""
    return config.optim.base_batch or config.batch.size


def total_epochs(config: Config) -> float | None:
    """Returns the epochs of the job; None if only stop.steps or stop.time ends it."""
    return None if config.epochs is None else config.epochs * epoch_multiplier(config)


def total_samples(config: Config, dataset: int) -> int:
    """Returns the samples of the job, or ENDLESS. The job ends with the first step that has read
    this many; 0.7 epochs of 10 samples are 7."""
    epochs = total_epochs(config)
    return ENDLESS if epochs is None else math.ceil(Fraction(repr(epochs)) * dataset)
