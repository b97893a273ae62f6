"""Labels in an evaluation: those without a class, those that are not read, those of other data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import own_data
import pytest
import torch

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.read import configure
from hvdtrain.data.declared import as_declared
from hvdtrain.data.source import ArraySource
from hvdtrain.data.subset import SubsetOfImages
from hvdtrain.data.user_data.as_source import as_source
from hvdtrain.extras.trained_models.evaluation import evaluate, labels_as_read
from hvdtrain.extras.trained_models.relabelled import relabelled
from hvdtrain.tasks import classification
from hvdtrain.training.build import build_learner
from hvdtrain.training.health.heartbeat import Heartbeat


def test_unlabelled_images_are_in_no_count_of_an_evaluation() -> None:
    y = np.where(np.arange(24) % 4 == 0, 255, np.arange(24) * 7 % 3)
    images = np.random.default_rng(1).integers(0, 255, (24, 6, 6, 3), dtype=np.uint8)
    source = as_source({"x": images, "y": y}, "mine", "data.name")
    config = configure(None, ["model.name=linear", "batch.evaluate=7"])
    task = classification.build("classification", source, source, "task.name", ignore_label=255)
    found = as_declared(source, task.fields)
    assert isinstance(found, ArraySource)
    learner = build_learner(config, task, SingleProcessCommunicator())  # of zeros: it says class 0
    result = evaluate(config, learner, found, task, SingleProcessCommunicator(), Heartbeat())
    assert (
        result.classes is not None
        and result.classes.samples.tolist() == np.bincount(y[y < 255]).tolist()
    )
    assert result.classes.right.tolist() == [int((y == 0).sum()), 0, 0]
    assert result.metrics == pytest.approx(
        {"loss": math.log(3), "accuracy": (y == 0).sum() / (y < 255).sum()}, rel=1e-6
    )


def test_labels_that_a_dataset_lists_are_not_counted_as_those_that_it_reads() -> None:
    class Remapped(torch.utils.data.Dataset):  # type: ignore[type-arg]
        targets = np.arange(6)

        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> Any:
            return np.zeros(2, np.float32), i % 2

    source = as_source(Remapped(), "mine", "data.name")
    assert labels_as_read(source) is None
    arrays = as_source(own_data.classes("val"), "mine", "data.name")
    assert labels_as_read(arrays) is not None


@pytest.mark.parametrize("in_memory", [True, False])
def test_labels_are_numbered_anew_by_name(in_memory: bool) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (6, 5, 4, 3), dtype=np.uint8)
    source = ArraySource(pixels, np.arange(6) % 3, 3, "here", class_names=("ant", "bee", "cat"))
    found = relabelled(
        source if in_memory else SubsetOfImages(source, np.arange(6)), ["cat", "dog", "ant", "bee"]
    )
    assert found.labels().tolist() == found.read(np.arange(6))["y"].tolist() == [2, 3, 0, 2, 3, 0]
    assert (found.classes, found.class_names, found.shape, len(found)) == (
        4,
        ("cat", "dog", "ant", "bee"),
        (5, 4, 3),
        6,
    )
    assert (found.read(np.array([4]))["x"] == source.read(np.array([4]))["x"]).all()
