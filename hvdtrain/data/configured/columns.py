"""data.fields of a table, where its first line alone says which columns are x and y."""

from __future__ import annotations

import json

from hvdtrain.config.schema import Config
from hvdtrain.config.yaml_reader import MOST_BYTES
from hvdtrain.data.source import Source


def with_columns(config: Config, source: Source) -> Config:
    """The configuration with the columns of the training set's fields, by name: other files of the
    same table may have them in another order."""
    columns = {name: list(texts) for name, texts in source.columns.items()}
    if not columns or config.data.options.get("fields") is not None or not _fits(columns):
        return config
    return config.replace(data=config.data.with_options(fields=columns))


def _fits(columns: dict[str, list[str]]) -> bool:
    """Whether config.yaml can hold them and be read again."""
    text = json.dumps(columns)
    return len(text) < MOST_BYTES // 4 and "${" not in text and "{split}" not in text
