"""Finds the array files of a source, without importing what reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hvdtrain.data.around_source import inner_source
from hvdtrain.data.source import Source

if TYPE_CHECKING:
    from hvdtrain.data.stored.source import StoredSource


def stored_in(source: Source) -> StoredSource | None:
    """Returns the StoredSource that a source wraps or is a part of; else None."""
    while not source.reads_array_files:
        inner = inner_source(source)
        if inner is None:
            return None
        source = inner
    return cast("StoredSource", source)
