"""A user's data, models, hook and task, for the examples of features: `mine:Hook` of an example is
`example_objects:Hook`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import hvdtrain
from hvdtrain.data.source import Source
from hvdtrain.tasks import classification
from hvdtrain.tasks.task import Task
from hvdtrain.tasks.user_functions import read_metrics
from hvdtrain.tasks.user_tasks import examples_of
from hvdtrain.tasks.user_tasks import measured as with_metrics

SIDE = 8
CLASSES = 3
VOCABULARY = 11
LONGEST = 12


def _images(split: str, samples: int, val_samples: int) -> tuple[np.random.Generator, np.ndarray]:
    dice = np.random.default_rng(["train", "val"].index(split))
    count = samples if split == "train" else val_samples
    return dice, dice.integers(0, 256, (count, SIDE, SIDE, 1), np.uint8)


def labels(split: str, samples: int = 36, val_samples: int = 12) -> dict[str, np.ndarray]:
    """Images, and of each whether three of its quarters are light."""
    _, x = _images(split, samples, val_samples)
    means = np.stack(
        [x[:, :4, :4].mean((1, 2, 3)), x[:, :4, 4:].mean((1, 2, 3)), x[:, 4:, :4].mean((1, 2, 3))],
        1,
    )
    return {"x": x, "y": (means > means.mean(0)).astype(np.uint8)}


def masks(split: str, samples: int = 36, val_samples: int = 12) -> dict[str, np.ndarray]:
    """Images, and of each pixel which third of the grey values it has."""
    _, x = _images(split, samples, val_samples)
    return {"x": x, "y": (x[..., 0] // 86).astype(np.uint8)}


def fields(split: str, samples: int = 36, val_samples: int = 12) -> dict[str, np.ndarray]:
    """An image and a table of each sample, and a class that follows from the table."""
    dice, image = _images(split, samples, val_samples)
    table = dice.normal(3.0, 2.0, (len(image), 4))
    y = (table @ np.linspace(-1.0, 1.0, 4 * CLASSES).reshape(4, CLASSES)).argmax(1)
    y[:CLASSES] = range(CLASSES)
    return {"image": image, "table": table, "y": y}


def stream(
    split: str,
    samples: int = 36,
    val_samples: int = 12,
    shape: object = None,
    classes: int = CLASSES,
) -> Iterator[dict[str, Any]]:
    """Images of classes, one after the other. shape: of the table's data, which have the same."""
    _, x = _images(split, samples, val_samples)
    for number, image in enumerate(x):
        yield {"x": image, "y": number % classes}


stream.classes = CLASSES  # type: ignore[attr-defined]


def sequences(split: str, samples: int = 36, val_samples: int = 12) -> dict[str, list[np.ndarray]]:
    """Sequences of 2 to LONGEST tokens; the first one is the longest."""
    dice = np.random.default_rng(["train", "val"].index(split))
    lengths = [
        LONGEST,
        *dice.integers(2, LONGEST + 1, (samples if split == "train" else val_samples) - 1),
    ]
    return {"tokens": [dice.integers(1, VOCABULARY, length) for length in lengths]}


class Both(nn.Module):
    """Scores of classes, from an image and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Linear(SIDE * SIDE, 6)
        self.table = nn.Linear(4, 6)
        self.both = nn.Linear(12, CLASSES)

    def forward(self, image: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.both(
            torch.cat([self.image(image.flatten(1)).tanh(), self.table(table).tanh()], 1)
        )
        return found


def keras_model(shape: tuple[int, ...], outputs: int) -> Any:
    import keras

    keras.utils.set_random_seed(3)
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(8, activation="tanh"),
        keras.layers.Dense(outputs),
    ]
    return keras.Sequential([keras.layers.Input(shape), *layers])


class Pixels(nn.Module):
    """Scores of the classes of each pixel (n, classes, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.last = nn.Conv2d(4, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.first(x).tanh())
        return found


class Hook(hvdtrain.Hook):
    """Logs the loss of each step, and has a state: the number of steps."""

    def __init__(self) -> None:
        self.steps = 0

    def after_step(self, training: Any) -> None:
        self.steps += 1
        training.log(own_loss=training.loss, steps=float(self.steps))

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def measured(
    train: Source, val: Source, users_model: bool, *, ignore_label: int | None = None
) -> Task:
    """Classification, with a metric of torchmetrics."""
    from torchmetrics.classification import (
        MulticlassF1Score,
    )  # takes a second, of the ranks that want it

    found = classification.build(
        "classification", train, val, "task.name", users_model, ignore_label=ignore_label
    )
    metric = MulticlassF1Score(num_classes=CLASSES, average="macro", ignore_index=ignore_label)
    return with_metrics(found, read_metrics({"f1": (metric, "max")}), None, examples_of(train))


def measured_in_arrays(train: Source, val: Source, users_model: bool) -> Task:
    """Classification, with a metric by a function, which every framework has."""
    found = classification.build("classification", train, val, "task.name", users_model)
    metrics = read_metrics(
        {"hits": (lambda outputs, batch: outputs.argmax(1) == batch["y"], "max")}
    )
    return with_metrics(found, metrics, None, examples_of(train))
