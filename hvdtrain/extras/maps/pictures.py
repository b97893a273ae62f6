"""Pictures of masks and maps of the validation set beside a model's, computed by all ranks."""

from __future__ import annotations

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.data.array_files import array_files_in
from hvdtrain.data.configured.opened import array_of_x
from hvdtrain.data.source import Source
from hvdtrain.data.subset import Subset
from hvdtrain.extras.maps import shown_masks
from hvdtrain.extras.maps.shown_maps import (
    MOST_CHANNELS,
    MapSamples,
    begins_in_the_south,
    part_of_maps,
    picture_of_maps,
)
from hvdtrain.frameworks.learner import Learner
from hvdtrain.tasks.task import Task
from hvdtrain.training.health.heartbeat import Heartbeat
from hvdtrain.training.predictions import predict


def picture(
    config: Config,
    task: Task,
    val: Source,
    learner: Learner,
    numbers: np.ndarray,
    heartbeat: Heartbeat,
) -> np.ndarray:
    """Returns uint8 (height, width, 3): samples of the validation set by their numbers, with what
    the model predicts. A collective."""
    label = task.mask_label
    draw = _of_maps if label is None else _of_masks
    return draw(config, task, val, learner, numbers, heartbeat)


def _of_masks(
    config: Config,
    task: Task,
    val: Source,
    learner: Learner,
    numbers: np.ndarray,
    heartbeat: Heartbeat,
) -> np.ndarray:
    label = task.mask_label
    assert label is not None, task
    field = task.fields[label]
    said = [np.empty((0, *field.shape), np.int64)]
    for _, predictions in predict(config, learner, Subset(val, numbers), learner.data, heartbeat):
        said.append(predictions.outputs.argmax(1))
    whole = learner.data.allgather(np.concatenate(said), "samples.masks")
    shown = val.read(numbers)
    return shown_masks.picture(
        shown_masks.Masks(numbers, shown[task.main_input], shown[label], whole, field.ignored)
    )


def _of_maps(
    config: Config,
    task: Task,
    val: Source,
    learner: Learner,
    numbers: np.ndarray,
    heartbeat: Heartbeat,
) -> np.ndarray:
    shown = val.read(numbers)
    true = part_of_maps(task.as_maps(shown["y"]))
    said = [true[:0]]
    for _, predictions in predict(config, learner, Subset(val, numbers), learner.data, heartbeat):
        said.append(part_of_maps(task.as_maps(predictions.outputs)))
    whole = learner.data.allgather(np.concatenate(said), "samples.maps")
    names = task.map_names[:MOST_CHANNELS]
    files = array_files_in(val)
    grid = None if files is None else files.known_grid(array_of_x(config))
    if begins_in_the_south(grid):
        true = true[:, :, ::-1]  # north on top
        whole = whole[:, :, ::-1]
    return picture_of_maps(MapSamples(numbers, true, whole, names))
