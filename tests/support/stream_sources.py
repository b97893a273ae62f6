"""The same samples as streams of every kind, for jobs of tests."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

CLASSES = 3
Sample = dict[str, Any]


def sample(number: int, split: str = "train") -> Sample:
    dice = np.random.default_rng([number, split == "val"])
    x = dice.normal(0.0, 1.0, 5)
    return {"x": x, "y": int((x @ np.linspace(-1.0, 1.0, 15).reshape(5, 3)).argmax())}


def generator(split: str, samples: int = 50) -> Iterator[Sample]:
    """A generator, which cannot be moved: it is read again."""
    for number in range(samples if split == "train" else 20):
        yield sample(number, split)


class _Samples:
    classes = CLASSES

    def __init__(self, split: str, first: int, last: int) -> None:
        self.split = split
        self.first = first
        self.last = last

    def __iter__(self) -> Iterator[Sample]:
        for number in range(self.first, self.last):
            yield sample(number, self.split)


class _Skipping(_Samples):
    """A stream with skip()."""

    def skip(self, samples: int) -> _Skipping:
        return _Skipping(self.split, self.first + samples, self.last)


class _Stateful(_Samples, torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """A stream with state_dict(), which continues where it was loaded until it has ended."""

    def __init__(self, split: str, last: int) -> None:
        super().__init__(split, 0, last)
        self.next = 0

    def __iter__(self) -> Iterator[Sample]:
        while self.next < self.last:
            self.next += 1
            yield sample(self.next - 1, self.split)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class _Drawing(_Samples):
    """A stream with noise from the generators that all threads share."""

    def __iter__(self) -> Iterator[Sample]:
        for found in super().__iter__():
            noise = np.random.normal(0.0, 0.1, 5) + torch.rand(5).numpy()
            yield {**found, "x": found["x"] + noise}


def of_class(kind: Any, split: str, samples: int) -> Any:
    return kind(split, 0, samples if split == "train" else 20)


def skipping(split: str, samples: int = 50) -> Any:
    return of_class(_Skipping, split, samples)


def stateful(split: str, samples: int = 50) -> Any:
    return _Stateful(split, samples if split == "train" else 20)


def drawing(split: str, samples: int = 50) -> Any:
    return of_class(_Drawing if split == "train" else _Samples, split, samples)


def hugging_face(split: str, samples: int = 50) -> Any:
    """A streaming data set of Hugging Face, with three shards."""
    import datasets

    found = [sample(number, split) for number in range(samples if split == "train" else 20)]
    columns = {"x": [one["x"] for one in found], "y": [one["y"] for one in found]}
    features = datasets.Features(
        {"x": datasets.List(datasets.Value("float64")), "y": datasets.ClassLabel(CLASSES)}
    )
    whole = datasets.Dataset.from_dict(columns, features=features)
    return whole.to_iterable_dataset(num_shards=3)


def of_ranks(split: str, samples: int = 500, after: int = 0) -> Iterator[Sample]:
    """A stream that differs between the ranks of Open MPI from some sample on."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    for number in range(samples if split == "train" else 20):
        yield sample(number + 1000 * rank * (number >= after), split)


def images(split: str, shape: Sequence[int], samples: int, val_samples: int) -> Iterator[Sample]:
    """Images of 10 classes."""
    for number in range(samples if split == "train" else val_samples):
        dice = np.random.default_rng([number, split == "val"])
        yield {"x": dice.integers(0, 256, shape, np.uint8), "y": number % 10}


images.classes = 10  # type: ignore[attr-defined]
generator.classes = of_ranks.classes = CLASSES  # type: ignore[attr-defined]
