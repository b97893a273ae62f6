"""The outputs of a model for the samples of a data set, each rank's share in order."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.data.sampler import evaluation_batches
from hvdtrain.data.source import Source
from hvdtrain.frameworks.learner import Learner, Predictions
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.input import device_batches, read_ahead_of, sharers_of_cores


def predict(
    config: Config,
    learner: Learner,
    source: Source,
    communicator: Communicator,
    heartbeat: Heartbeat,
) -> Iterator[tuple[np.ndarray, Predictions]]:
    """Yields predictions for this rank's share of the samples, in order: the indices of a batch,
    int64 (n,), and the model's output.

    A collective if the learner is sharded: the model is then also called for empty batches, which
    are not yielded.
    """
    ahead, readers = read_ahead_of(config.data, source, sharers_of_cores(config, communicator))
    batches = evaluation_batches(
        len(source), config.batch.evaluate, communicator.rank, communicator.size
    )
    pool = ThreadPoolExecutor(readers, "hvdtrain-reader") if ahead else None
    try:
        for indices, batch in zip(
            batches, device_batches(source, batches, learner, pool, ahead), strict=True
        ):
            heartbeat.beat("evaluation", 0, 0)
            if batch is not None:
                predictions = learner.predict(batch)
                if len(indices):
                    yield indices, predictions
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
