"""data.fields of a table whose header line alone shows which columns are x and y."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hvdtrain.config import plugins
from hvdtrain.config.schema import Config
from hvdtrain.config.yaml_reader import MOST_BYTES
from hvdtrain.data.array_files import name_and_words
from hvdtrain.data.source import Source
from hvdtrain.errors import UserError, short


def with_columns(config: Config, source: Source) -> Config:
    """Returns the configuration with the columns of the training set's fields, by name: other files
    of the same table may order them differently."""
    columns = {name: list(texts) for name, texts in source.columns.items()}
    if plugins.is_users_own(config.data) or config.data.options.get("fields") is not None:
        return config
    if not columns or not _fits(columns):
        return config
    return config.replace(data=config.data.with_options(fields=columns))


def columns_of_x(options: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the columns of x that the options of a run's data set have, in the order of the
    model's inputs; empty if they are unknown."""
    x = (options.get("fields") or {}).get("x", ())
    named = [name_and_words(text) for text in ([x] if isinstance(x, str) else x)]
    return () if any(words for _, words in named) else tuple(name for name, _ in named)


def check_columns(config: Config, train: Source, val: Source) -> None:
    """Raises UserError if both sets are tables with the same columns in different orders, because a
    model's input has no names."""
    for name in train.columns.keys() & val.columns.keys():
        one = list(train.columns[name])
        other = list(val.columns[name])
        if one != other and sorted(one) == sorted(other):
            place = next(
                place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b
            )
            raise UserError(
                f"column {place} of {name} is {short(one[place], 60)} in the training set, and "
                f"{short(other[place], 60)} in the validation set",
                config.where("data.name"),
                "give both the same order of columns; for DataFrames: "
                "val_frame[train_frame.columns]",
            )


def _fits(columns: dict[str, list[str]]) -> bool:
    """Whether config.yaml can store the columns and be read again."""
    text = json.dumps(columns)
    return len(text) < MOST_BYTES // 4 and "${" not in text and "{split}" not in text
