"""The loss and the gradient of a run's model at any weights, over all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.comm.communicator import Communicator
from hvdtrain.config.schema import Config
from hvdtrain.core.arrays import Arrays, ArrayStream
from hvdtrain.core.progress import Hyper
from hvdtrain.data.sampler import evaluation_batches
from hvdtrain.data.source import Source
from hvdtrain.extras.trained_models.evaluation import evaluate
from hvdtrain.extras.trained_models.trained_model import TrainedModel
from hvdtrain.training.health.heartbeat import Heartbeat

_ONLY_GRADIENT = Hyper(lr=1.0, momentum=0.0, weight_decay=0.0, batch=1)


class Model(NamedTuple):
    """A model whose weights are replaced. Every rank calls its methods."""

    config: Config  # with SGD
    trained: TrainedModel
    source: Source  # the samples
    communicator: Communicator
    heartbeat: Heartbeat

    def weights(self) -> Arrays:
        """Returns copies of the weights "p.*" and buffers "b.*"."""
        state = self.trained.learner.state()
        return {name: np.array(array) for name, array in state.items() if name[:2] != "s."}

    def metrics(self, weights: Arrays) -> dict[str, float]:
        """Returns the task's metrics at these weights, over all samples."""
        self._load(weights)
        learner, task, *_ = self.trained
        return evaluate(
            self.config, learner, self.source, task, self.communicator, self.heartbeat
        ).metrics

    def loss(self, weights: Arrays) -> float:
        return self.metrics(weights)["loss"]

    def gradient(self, weights: Arrays) -> Mapping[str, np.ndarray]:
        """Returns the gradient of the mean loss over all samples: what one step of SGD with a rate
        of 1 subtracts. It is of a training pass: with dropout and the statistics of its batches."""
        self._load(weights)
        learner = self.trained.learner
        batches = [
            learner.to_device(self.source.read(indices)) for indices in self._batches_of_rank()
        ]
        hyper = _ONLY_GRADIENT._replace(batch=len(self.source))
        learner.step(batches, hyper, self.config.seed)
        after = learner.state()
        return {
            name: array.astype(np.float64) - after[name]
            for name, array in weights.items()
            if name.startswith("p.")
        }

    def _batches_of_rank(self) -> Sequence[np.ndarray]:
        return list(
            evaluation_batches(
                len(self.source),
                self.config.batch.evaluate,
                self.communicator.rank,
                self.communicator.size,
            )
        )

    def _load(self, weights: Arrays) -> None:
        shapes = {name: array.shape for name, array in weights.items()}
        self.trained.learner.load(ArrayStream(shapes, weights.items(), is_partial=True))
