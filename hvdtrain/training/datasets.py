"""The training and validation set of a job, and the task that they define."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config, DataConfig
from hvdtrain.data.files.staging import stage_data
from hvdtrain.data.images import augment
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Task
from hvdtrain.training.build import build_recipe
from hvdtrain.training.checkpoint.files import Identity


class Datasets(NamedTuple):
    """What a rank reads by itself, without other ranks."""

    train: Source
    val: Source
    task: Task


def open_datasets(config: Config) -> Datasets:
    """Opens both sets. Raises UserError where data are missing or broken, or do not fit the recipe or the augmentation."""
    train = build_source(config, "train")
    val = build_source(config, "val")
    build_recipe(config, len(train))
    augment.check_augmentation(config.augment, train.shape)
    return Datasets(train, val, build_task(train, val, config.data))


def build_source(config: Config, split: Split) -> Source:
    """One of the two sets. It needs no ranks: missing data is reported before any rank waits for another. Raises UserError."""
    make = plugins.load("data/datasets", config.data.name, config.where("data.name")).build
    options = plugins.convert_options(config.data, "data/datasets")
    root = Path(config.data.root).expanduser() if config.data.root else None
    if config.data.stage is not None:
        root, options = stage_data(config.data.name, root, options, config.data.stage, config.where("data.stage"))
    source: Source = make(config.data.name, root, split, **options)
    return source


def unstaged(config: Config) -> Config:
    """For commands that train nothing: data are read where they are, and not copied to data.stage."""
    return config.replace(data=config.data.replace(stage=None))


def build_task(train: Source, val: Source, config: DataConfig) -> Task:
    """The task of both sets; the statistics of the training set normalize the channels. Raises UserError where the sets do not fit."""
    if (train.shape, train.classes) != (val.shape, val.classes):
        what = f"training images are {train.shape} with {train.classes} classes, validation images {val.shape} with {val.classes}"
        raise UserError(what, config.where("root"), "both sets need the same shape (H, W, C) and the same classes")
    mean, std = train.stats()
    return Task(train.shape, train.classes, mean, std)


def facts(config: Config, datasets: Datasets) -> dict[str, Any]:
    """What must be equal on all ranks, by the name that a message gives it: the data, and every key of the configuration."""
    task = datasets.task
    found: dict[str, Any] = {
        "training samples": len(datasets.train),
        "validation samples": len(datasets.val),
        "image shape": task.shape,
        "classes": task.classes,
        "mean of the pixels": task.mean.tolist(),
        "their deviation": task.std.tolist(),
    }
    for name, value in config.model_dump().items():
        found |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return found


def identity(config: Config, datasets: Datasets) -> Identity:
    """What a checkpoint keeps, to be compared at a resume: the seed and the training set."""
    task = datasets.task
    data = {
        "samples": len(datasets.train),
        "shape": list(task.shape),
        "classes": task.classes,
        "mean": task.mean.tolist(),
        "std": task.std.tolist(),
    }
    return {"seed": config.seed, "data": data}
