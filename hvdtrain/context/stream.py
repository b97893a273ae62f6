"""The samples of a custom loop: an endless stream from the trainer's sampler, with each batch
divided among the ranks."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Progress
from hvdtrain.data.configured.pad import padding_of
from hvdtrain.data.declared import as_declared
from hvdtrain.data.sampler import positions_of_rank
from hvdtrain.data.source import Source
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.errors import UserError
from hvdtrain.training.build import build_recipe
from hvdtrain.training.input import Prefetcher

WHERE = "ctx.samples()"


class SampleOrder(NamedTuple):
    """Everything that the order of samples depends on. Checkpoints contain it, so that a changed
    script cannot resume with another order."""

    dataset: int  # samples
    seed: int
    sampling: str


class SampleStream:
    """The samples of a script, by position. Raises UserError for an unsupported data set and for
    invalid numbers."""

    def __init__(
        self,
        config: Config,
        communicator: Communicator,
        learner: Any,
        dataset: object,
        batch: int,
        epochs: float,
        seed: int,
    ) -> None:
        _check(batch, epochs, seed)
        self.source = checked_source(dataset, WHERE, config)
        if batch > len(self.source):
            raise UserError(
                f"batch={batch} is more than the {len(self.source)} samples",
                WHERE,
                f"{len(self.source)} or less",
            )
        self.order = SampleOrder(len(self.source), seed, config.data.sampling)
        self.batch = batch
        self.total = math.ceil(Fraction(repr(epochs)) * len(self.source))
        self.config = config.replace(
            seed=seed, epochs=epochs, batch=config.batch.replace(size=batch)
        )
        recipe = build_recipe(self.config, len(self.source), None)
        # the script has the micro-batches: accumulate()
        undivided = self.config.replace(parallel=self.config.parallel.with_one_pass())
        self.prefetcher = Prefetcher(undivided, communicator, recipe, self.source, learner)
        self._communicator = communicator
        self._learner = learner

    def take(self, p: Progress) -> Any:
        """Returns this rank's Samples of the step after `p`; a rank without samples gets one that
        does not count."""
        (samples,) = self.prefetcher.take(p).micro_batches
        if not samples.count:
            first = positions_of_rank(
                p.samples, 1, 0, 1, p.dataset, self.config.seed, self.config.data.sampling
            )
            one = self._learner.to_device(
                self.source.read_in_epochs(first.samples, first.epochs, self.config.seed)
            )
            samples = dataclasses.replace(one, count=0)
        behind = p.advance(self.batch)
        return dataclasses.replace(
            samples, step=p.step, epoch=p.epoch, ends_epoch=behind.epoch > p.epoch
        )


def checked_source(dataset: object, where: str, config: Config) -> Source:
    """Returns the data set of a custom loop; its integers are checked as they are read. Raises
    UserError for an unsupported data set."""
    found = as_source(
        dataset,
        "the data set",
        where,
        config.data.workers,
        tuple(config.data.inputs),
        padding_of(config),
    )
    if missing := [name for name in config.data.inputs if name not in found.fields]:
        what = (
            f"data.inputs names {missing[0]}, but the samples only have {', '.join(found.fields)}"
        )
        raise UserError(
            what,
            config.where("data.inputs"),
            "names of fields of the data set",
        )
    return as_declared(found, found.fields)


def rows_of(source: Source, rows: np.ndarray, learner: Any) -> Any:
    """Returns samples for an evaluation. A rank that has none left gets a sample that does not
    count."""
    if len(rows):
        return learner.to_device(source.read(rows))
    return dataclasses.replace(learner.to_device(source.read(np.zeros(1, np.int64))), count=0)


def check_batch(
    batch: object,
    where: str,
    name: str = "batch",
    fix: str = "1 or more, over all ranks: batch=256",
) -> None:
    """Raises UserError if it is not a number of samples."""
    if isinstance(batch, bool) or not isinstance(batch, (int, np.integer)) or batch < 1:
        raise UserError(f"{name}={batch!r:.40} is not a number of samples", where, fix)


def _check(batch: object, epochs: object, seed: object) -> None:
    check_batch(batch, WHERE)
    if isinstance(epochs, bool) or not isinstance(epochs, (int, float)) or not 0 < epochs < 2**31:
        raise UserError(
            f"epochs={epochs!r:.40} is not a length", WHERE, "a number above 0, as epochs=10 or 0.5"
        )
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise UserError(
            f"seed={seed!r:.40} is not a seed",
            WHERE,
            "a whole number, 0 or more, the same on every rank",
        )
