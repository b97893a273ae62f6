"""Columns of a table that are read as texts, by the data set of documents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.config import plugins
from hvdtrain.core.extras import document_files
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Source, Split

# reads fields of a file: each row with its number
RowsOf = Callable[[Path, Sequence[str]], Iterable[tuple[int, Mapping[str, object]]]]


def texts_of_table(
    name: str,
    root: Path | None,
    split: Split,
    suffixes: tuple[str, ...],
    rows_of: RowsOf,
    texts: Mapping[str, Any],
    numbers: Mapping[str, object],
    **more: Any,
) -> Source | None:
    """Returns the texts in columns of a table; None if no option of texts is set.

    texts: these options. numbers: those of tables of numbers, which exclude them. more: see
    build_of_table() of the data set of documents. Raises UserError.
    """
    chosen = [option for option, value in texts.items() if value is not None and value is not True]
    if not chosen:
        return None
    reader = next(iter(document_files().values()), None)
    if reader is None:
        raise OptionError(
            f"data.{chosen[0]} reads texts, but this copy of hvdtrain has no extra that does so",
            chosen[0],
            "leave it out; or a copy with all extras (`hvdtrain extras` lists the installed ones)",
        )
    plugin = plugins.load("data/datasets", reader, f"data.{chosen[0]}")
    found: Source = plugin.build_of_table(
        name, root, split, suffixes, rows_of, texts, numbers, **more
    )
    return found
