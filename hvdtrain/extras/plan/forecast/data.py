"""The training data of a plan: sizes from the command line, else the job's data. Downloads
nothing."""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.options import CommandParser
from hvdtrain.config.schema import Config
from hvdtrain.data.configured.unwritten import published, unwritten
from hvdtrain.data.files.folders import FilesMissing
from hvdtrain.errors import UserError
from hvdtrain.tasks.classification import without_statistics
from hvdtrain.tasks.task import Task
from hvdtrain.training.build import planned_task
from hvdtrain.training.datasets import build_source, check_augmentation


class TrainingData(NamedTuple):
    samples: int
    task: Task
    origin: str  # for people


def add_data_options(parser: CommandParser) -> None:
    """Sizes of data that are not read."""
    parser.add_argument("--samples", type=_read_count)
    parser.add_argument("--image", type=_read_image)
    parser.add_argument("--classes", type=_read_count)


def _read_count(value: str) -> int:
    if not (value.isdecimal() and int(value)):
        raise UserError(
            f"{value} is not a number of samples or classes",
            "--samples, --classes",
            "give 1 or more, as in --samples 1281167",
        )
    return int(value)


def _read_image(value: str) -> tuple[int, ...]:
    """Parses (height, width, channels)."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", value)
    if not match:
        raise UserError(
            f"cannot read the shape {value!r}",
            "--image",
            "give height x width x channels, as in --image 224x224x3",
        )
    return tuple(map(int, match.groups()))


def training_data(options: argparse.Namespace, config: Config) -> TrainingData:
    """Returns the data from the command line, or opens them as a job does, without the statistics,
    which need all pixels."""
    given = [options.samples, options.image, options.classes]
    example = "--samples 1281167 --image 224x224x3 --classes 1000"
    if None not in given:
        origin = "by --samples, --image and --classes; no data is read"
        return TrainingData(
            options.samples, without_statistics(options.image, options.classes), origin
        )
    if any(given):
        raise UserError(
            "--samples, --image and --classes need each other",
            "command line",
            f"give all three: {example}",
        )
    without_data = f"plan without data, as in {example}"
    try:
        with tempfile.TemporaryDirectory(prefix="hvdtrain-plan-") as scratch:
            source = build_source(unwritten(config, Path(scratch)), "train")
            check_augmentation(config, source)
            return TrainingData(
                len(source), planned_task(config, source), f"data.name={config.data.name}"
            )
    except FilesMissing as error:
        sizes = published(config) if config.task.name == "classification" else None
        if sizes is None:
            what = error.what.replace("data.download is false", "plan downloads nothing")
            raise UserError(what, error.where, f"{error.fix}; or {without_data}") from None
        samples, shape, classes = sizes
        origin = (
            f"as data.name={config.data.name} is published; its files are not here, and plan "
            "downloads nothing"
        )
        return TrainingData(samples, without_statistics(shape, classes), origin)
    except UserError as error:
        raise UserError(
            error.what,
            error.where,
            f"{error.fix}; or {without_data}" if error.fix else without_data,
        ) from None
