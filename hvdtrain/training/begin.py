"""The state of a job that has not begun."""

from __future__ import annotations

from hvdtrain.config.schema import Config
from hvdtrain.core.metrics import zero_sums
from hvdtrain.core.progress import Progress
from hvdtrain.recipe.clock import total_samples
from hvdtrain.tasks.task import objective
from hvdtrain.training.datasets import Datasets
from hvdtrain.training.progress.train_state import TrainState


def begin(config: Config, datasets: Datasets) -> TrainState:
    """With the sums and the objective of the task."""
    samples, metric = len(datasets.train), objective(datasets.task)
    progress = Progress(samples, total_samples(config, samples))
    evaluates = config.evaluate.samples or len(datasets.val)
    return TrainState(
        progress,
        evaluates=evaluates,
        views=config.evaluate.views,
        sums=zero_sums(datasets.task.sums),
        objective=metric.name,
        better=metric.better,
    )
