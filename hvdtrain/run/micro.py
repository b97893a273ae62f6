"""One step's micro-batches: which samples a rank's passes take, and with which weights."""

from __future__ import annotations

import numpy as np

from hvdtrain.comm.engine import Engine
from hvdtrain.config import Config
from hvdtrain.data.sampler import indices, largest_share
from hvdtrain.data.source import Source
from hvdtrain.recipe.noise import sample_weights
from hvdtrain.state import Batch, Hyper, Progress


def rows_of_step(config: Config, p: Progress, hyper: Hyper, first_batch: int, engine: Engine) -> list[np.ndarray]:
    """The samples of this rank's passes: equally many passes on every rank, since a pass may have collectives in it.

    Without batch.micro a batch that has grown beyond the job's first one takes as many passes more, so that memory stays as it was.
    """
    mine = indices(p.samples, hyper.batch, engine.rank, engine.size, p.dataset, config.seed, config.data.sampling)
    most = largest_share(p.samples, hyper.batch, engine.size, p.dataset, config.data.sampling)
    return np.array_split(mine, passes(config, most, hyper.batch, first_batch))


def passes(config: Config, most: int, batch: int, first_batch: int) -> int:
    """Forward passes of a step: `most` is the largest share of a rank, `first_batch` the global batch that the job began with."""
    return -(-most // config.batch.micro) if config.batch.micro else -(-batch // first_batch)


def read(source: Source, rows: np.ndarray, hyper: Hyper, seed: int) -> Batch:
    """The samples, with random weights where the recipe asks for gradient noise."""
    batch = source.read(rows)
    if hyper.sample_noise:
        batch = batch | {"w": sample_weights(seed, hyper.step, rows, hyper.sample_noise)}
    return batch
