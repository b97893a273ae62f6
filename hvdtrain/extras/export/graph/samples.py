"""Samples that a model's file is compared with: random numbers in the form of a task's fields."""

from __future__ import annotations

import numpy as np

from hvdtrain.core.arrays import Batch
from hvdtrain.data.field import Field
from hvdtrain.data.packed import SEGMENTS, TOKENS, is_packed
from hvdtrain.tasks.task import Task


def random_samples(task: Task, count: int, shorter_by: int) -> Batch:
    """Returns `count` samples, images (n, H, W, C). Padded and packed samples, and windows of
    tokens, are `shorter_by` shorter than the longest; each padded one has its own length."""
    rng = np.random.default_rng(count)
    fields = {
        name: field._replace(shape=(max(2, field.shape[0] - shorter_by), *field.shape[1:]))
        if field.padding is not None or name == TOKENS
        else field
        for name, field in task.fields.items()
    }
    batch = {name: _numbers(rng, field, count) for name, field in fields.items()}
    for name, field in fields.items():
        if field.padding is None or not field.padding.mask:
            continue
        lengths = rng.integers(2, field.shape[0] + 1, count)
        lengths[0] = field.shape[0]
        mask = np.arange(field.shape[0]) < lengths[:, None]  # (n, T)
        batch[name][~mask] = field.padding.value
        batch[field.padding.mask] = mask
    if is_packed(task.fields):  # sequences of 3 tokens
        numbers = 1 + np.arange(fields[SEGMENTS].shape[0]) // 3
        batch[SEGMENTS] = np.tile(numbers, (count, 1))
    return batch


def _numbers(rng: np.random.Generator, field: Field, count: int) -> np.ndarray:
    """Returns random integers of the field's range; 0 and 1 if it is unknown; masks of real rows;
    and of floats 0, because the model's input replaces them."""
    shape = (count, *field.shape)
    if field.is_mask:
        return np.ones(shape, field.dtype)
    kind = np.dtype(field.dtype).kind
    if kind == "b":
        return rng.random(shape) < 0.5
    if kind == "f":
        return np.zeros(shape, field.dtype)
    most = field.values or (256 if field.dtype == "uint8" else 2)
    return rng.integers(0, most, shape).astype(field.dtype)
