"""Data and tasks as a user's own module has them: data.name=own_data:numbers,
task.name=own_data:quantile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.core.metrics import Metric, ratio
from hvdtrain.data.field import Field
from hvdtrain.data.source import NamedArrays, Source
from hvdtrain.tasks import classification
from hvdtrain.tasks.classification import Classification
from hvdtrain.tasks.task import Each

SAMPLES = {"train": 131, "val": 47}
VOCABULARY = 11
PADDING = 0
UNLABELLED = -1


def numbers(split: str, outputs: int = 2) -> dict[str, np.ndarray]:
    """Two numbers (or `outputs`) that follow from six in a row of pairs, with noise."""
    random = np.random.default_rng(["train", "val"].index(split))
    samples = SAMPLES[split]
    x = random.normal(3.0, 2.0, (samples, 3, 2))
    y = (
        x.reshape(samples, 6) @ np.linspace(-1.0, 1.0, 6 * outputs).reshape(6, outputs)
        + 5.0
        + random.normal(0.0, 0.3, (samples, outputs))
    )
    return {"x": x, "y": y if outputs > 1 else y[:, 0]}


def classes(split: str) -> dict[str, np.ndarray]:
    """Six columns, and which of three sums of them is the largest."""
    x = numbers(split)["x"].reshape(SAMPLES[split], 6)
    return {"x": x, "y": (x @ np.linspace(-1.0, 1.0, 18).reshape(6, 3)).argmax(1)}


def labels(split: str) -> dict[str, np.ndarray]:
    """Six columns, and which of four sums of them are above 0; of a fifth label no sample."""
    x = numbers(split)["x"].reshape(SAMPLES[split], 6)
    above = (x - 3.0) @ np.linspace(-1.0, 1.3, 24).reshape(6, 4) > np.array([0.0, 1.0, 4.0, -3.0])
    return {"x": x, "y": np.concatenate([above, np.zeros_like(above[:, :1])], 1)}


def shapes(split: str) -> dict[str, np.ndarray]:
    """Noisy images with a rectangle and a disc, and the class of each pixel; the last rows of some
    have none, 255."""
    random = np.random.default_rng(["train", "val"].index(split))
    samples = {"train": 40, "val": 12}[split]
    rows, columns = np.mgrid[:16, :16]
    y = np.zeros((samples, 16, 16), np.uint8)
    for mask in y:
        top, left, row, column = random.integers(0, 9, 4)
        mask[top : top + 6, left : left + 5] = 1
        mask[(rows - row - 4) ** 2 + (columns - column - 4) ** 2 < 12] = 2
    colours = np.array([[60, 60, 60], [180, 90, 60], [60, 90, 180]])
    x = (colours[y] + random.normal(0, 25, (samples, 16, 16, 3))).clip(0, 255).astype(np.uint8)
    y[rows[None] >= 16 - (np.arange(samples) % 5)[:, None, None]] = 255
    return {"x": x, "y": y}


def partly_labelled(split: str) -> dict[str, np.ndarray]:
    """Returns the same samples, but two of five samples, and all of the first twenty, have no
    class."""
    found = classes(split)
    number = np.arange(SAMPLES[split])
    return {
        "x": found["x"],
        "y": np.where((number % 5 < 2) | (number < 20), UNLABELLED, found["y"]).astype(np.int16),
    }


def tokens(split: str, length: int = 9) -> NamedArrays:
    """Windows that count on, by 1 or 2; most are padded at their end, every seventh whole."""
    random = np.random.default_rng(["train", "val"].index(split))
    samples = SAMPLES[split]
    found = (
        random.integers(1, VOCABULARY, (samples, 1))
        + np.arange(length) * random.integers(1, 3, (samples, 1))
    ) % (VOCABULARY - 1) + 1
    found[np.arange(length) >= random.integers(2, length + 3, (samples, 1))] = PADDING
    found[::7] = PADDING
    return NamedArrays(
        {"tokens": found.astype(np.uint16)}, {"tokens": VOCABULARY}, f"tokens, {split}"
    )


@dataclass(frozen=True)
class Quantile:
    """A user's own task: the quantile `share` of one number, by the pinball loss; and how often it
    is below."""

    shape: tuple[int, ...]
    share: float

    name = "quantile"
    metrics = (
        Metric("loss", ratio("loss", "count"), "min"),
        Metric("below", ratio("below", "count"), "min"),
    )
    objective = "loss"
    sample_weight = 1

    @property
    def sums(self) -> dict[str, int]:
        return {"loss": 0, "below": 0}

    @property
    def fields(self) -> dict[str, Field]:
        return {"x": Field("float64", self.shape), "y": Field("float64", ())}

    @property
    def sizes(self) -> dict[str, Any]:
        return {"shape": self.shape, "outputs": 1}

    summary = "one quantile"

    def weight(self, batch: dict[str, np.ndarray]) -> int:
        return len(batch["y"])

    def facts(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "share": self.share}

    def outputs(self, samples: int) -> str:
        return f"({samples}, 1)"

    def fits(self, found: tuple[int, ...], samples: int) -> bool:
        return found == (samples, 1)

    def torch(self, model: Any, place: Any) -> Quantile:
        return self

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["x"] - 3.0

    def each(self, outputs: Any, batch: dict[str, Any], training: bool) -> Each:
        error = batch["y"] - 5.0 - outputs[:, 0]
        return Each((self.share * error).maximum((self.share - 1.0) * error), {"below": error < 0})


class Balanced(Classification):
    """Classification with a confusion matrix, whose mean recall of the classes decides."""

    name = "balanced"
    objective = "balanced"
    metrics = (
        *classification.metrics_over("count"),
        Metric("balanced", lambda sums: recall(sums["confusion"]), "max", percent=True),
    )

    @property
    def sums(self) -> dict[str, int]:  # type: ignore[override]
        return {"loss": 0, "right": 0, "confusion": self.classes**2}

    def torch(self, model: Any, place: Any) -> BalancedInTorch:  # type: ignore[override]
        return BalancedInTorch(super().torch(model, place), self.classes)


class BalancedInTorch:
    def __init__(self, part: Any, classes: int) -> None:
        self.part = part
        self.classes = classes
        self.inputs = part.inputs

    def each(self, outputs: Any, batch: dict[str, Any], training: bool) -> Each:
        import torch

        each = self.part.each(outputs, batch, training)
        cell = batch["y"] * self.classes + outputs.argmax(1)
        return each._replace(
            terms=each.terms | {"confusion": torch.nn.functional.one_hot(cell, self.classes**2)}
        )


def recall(confusion: Any) -> float:
    matrix = np.reshape(confusion, (10, 10))
    return float(np.mean(np.diagonal(matrix) / np.maximum(1, matrix.sum(1))))


def balanced(train: Source, val: Source) -> Balanced:
    return Balanced(*vars(classification.build("balanced", train, val, "task.name")).values())


def restore_balanced(facts: dict[str, Any]) -> Balanced:
    return Balanced(*vars(classification.restore(facts)).values())


balanced.restore = restore_balanced  # type: ignore[attr-defined]


def quantile(train: Source, share: float = 0.5) -> Quantile:
    return Quantile(train.fields["x"].shape, share)


def restore(facts: dict[str, Any]) -> Quantile:
    return Quantile(tuple(facts["shape"]), facts["share"])
