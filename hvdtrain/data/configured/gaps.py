"""data.gaps: sources whose floats may be NaN in some fields, where a value is missing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from hvdtrain.data.around_source import where_of
from hvdtrain.data.declared import CheckedSource
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import NamedArrays, Source
from hvdtrain.data.subset import Subset


def with_gaps(source: Source, names: Collection[str]) -> Source:
    """Returns the source with Field.gaps in these fields. Raises OptionError for a field that it
    does not have, that has no floats, or whose numbers are checked elsewhere."""
    for name in names:
        field = source.fields.get(name)
        if field is None or np.dtype(field.dtype).kind != "f":
            has = ", ".join(f"{one} {kind}" for one, kind in source.fields.items())
            what = f"data.gaps has {name}, but the data have {has}"
            raise OptionError(what, "gaps", "fields of floats, whose missing values are NaN")
    return _with_gaps(source, names) if names else source


def _with_gaps(source: Source, names: Collection[str]) -> Source:
    if isinstance(source, Subset):
        return replace(source, source=_with_gaps(source.source, names))
    if isinstance(source, NamedArrays):
        return source if set(names) <= source.gaps else replace(source, gaps=frozenset(names))
    if isinstance(source, CheckedSource):
        inner = source.source.with_gaps(names)
        declared = {name: source.fields[name]._replace(gaps=True) for name in names}
        return replace(source, source=inner, declared={**source.declared, **declared})
    raise OptionError(
        f"data.gaps needs arrays or files of arrays, but {where_of(source)} is read sample by "
        "sample",
        "gaps",
        "a dict of arrays, or a file of them",
    )
