"""Header lines about data that may not be as intended."""

from __future__ import annotations

import numpy as np

from hvdtrain.config.schema import Config
from hvdtrain.data.array_files import array_files_in
from hvdtrain.data.source import Source
from hvdtrain.errors import short
from hvdtrain.training.datasets import Datasets
from hvdtrain.training.input import block_shuffle, ranks_read_own_blocks
from hvdtrain.training.model_inputs import notes_on_fields


def notes(config: Config, datasets: Datasets) -> list[str]:
    """Returns lines for the user about data that may not be as intended."""
    train, val, task, _ = datasets
    lines = list(
        dict.fromkeys(line for source in (train, val) for line in source.notes)
    ) + _notes_on_blocks(config, train)
    lines += _class_counts(train)
    lines += notes_on_fields(config, train, task.fields)
    lines += task.notes
    if (
        config.data.val_share is not None
        and _has_hidden_labels(train)
        and task.name != "regression"
    ):
        lines.append(
            "data.val_share is drawn from all samples, not from each class: labels are only read "
            "with the samples (`targets` would provide them)"
        )
    return lines + task.notes_on_data(train, val, has_given_stats=bool(config.data.mean))


def _notes_on_blocks(config: Config, train: Source) -> list[str]:
    """Returns a line if blocks of files are decoded more than once in an epoch for lack of
    memory."""
    files = array_files_in(train)
    if files is None or files.rows_of_block is None:
        return []
    shuffle = block_shuffle(config.data)
    cache_mb = files.cache_bytes / 1e6
    samples = len(train) if shuffle is None else min(len(train), shuffle.block * shuffle.window)
    wanted_mb = samples * files.bytes_of_sample / 1e6
    if wanted_mb <= cache_mb:
        return []
    of = "the training set" if shuffle is None else "a window of data.shuffle_window"
    fix = (
        "data.shuffle=blocks decodes each once"
        if shuffle is None
        else "a smaller window decodes each once"
    )
    often = (
        f"about {files.decodes_of_block(ranks_read_own_blocks(config)):.1f} times in an epoch"
        if shuffle is None
        else "again and again"
    )
    return [
        f"{of} is {wanted_mb:,.0f} MB, and data.cache_mb={cache_mb:,.0f}: blocks are decoded "
        f"{often}; {fix}, or a larger cache"
    ]


def _class_counts(train: Source) -> list[str]:
    """Returns a line with the samples of each class of a table with data.columns."""
    names = train.class_names
    labels = train.known_labels() if names and train.has_encoded_columns else None
    if labels is None:
        return []
    counts = np.bincount(labels, minlength=len(names)).tolist()
    shown = ", ".join(f"{name} {count:,}" for name, count in zip(names, counts, strict=True))
    return [f"classes of the training set: {short(shown, 200)}"]


def _has_hidden_labels(source: Source) -> bool:
    """Whether samples have an integer y that is known only when they are read."""
    y = source.fields.get("y")
    return (
        y is not None
        and not y.shape
        and np.dtype(y.dtype).kind in "iu"
        and source.known_labels() is None
    )
