"""Tables of pandas as their columns, and back."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.library_forms import Form


def _pandas() -> Any:
    """Not imported for a table of another rank: where this one works with tables, it has."""
    found = sys.modules.get("pandas")
    if found is None:
        raise BadCall("this rank has not imported pandas", "a table of another rank", "import pandas on every rank")
    return found


def _is(name: str, thing: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and type(thing) is getattr(pandas, name)


def _values_content(values: Any) -> list[Any]:
    """Values of a Series or an Index: numbers of NumPy, categories, times of a zone, or a dtype that its name tells."""
    pandas, dtype = _pandas(), values.dtype
    if isinstance(dtype, np.dtype):
        return ["numpy", np.asarray(values)]
    if isinstance(dtype, pandas.CategoricalDtype):
        array = values.array
        return ["categories", np.asarray(array.codes), _index_content(array.categories), bool(array.ordered)]
    if pandas.api.types.pandas_dtype(str(dtype)) != dtype:
        raise ValueError(f"a column of dtype {dtype}")
    if isinstance(dtype, pandas.DatetimeTZDtype):
        return ["zone", np.asarray(values.array.tz_convert("UTC").tz_localize(None)), str(dtype)]
    members = values.array.astype(object)
    members[pandas.isna(members)] = None
    return ["name", members.tolist(), str(dtype)]


def _values(content: Any) -> Any:
    pandas, (kind, values, *more) = _pandas(), content
    if kind == "categories":
        return pandas.Categorical.from_codes(values, _index(more[0]), ordered=more[1])
    if kind == "zone":
        return pandas.array(values).tz_localize("UTC").astype(more[0])
    return pandas.array(values, dtype=more[0]) if kind == "name" else values


def _index_content(index: Any) -> list[Any]:
    pandas = _pandas()
    if isinstance(index, pandas.RangeIndex):
        return ["range", [index.start, index.stop, index.step], index.name]
    if isinstance(index, pandas.MultiIndex):
        return ["levels", [_index_content(index.get_level_values(level)) for level in range(index.nlevels)], None]
    frequency = index.freqstr if isinstance(index, (pandas.DatetimeIndex, pandas.TimedeltaIndex)) else None
    return ["values", [_values_content(index), frequency], index.name]


def _index(content: Any) -> Any:
    pandas, (kind, values, name) = _pandas(), content
    if kind == "range":
        return pandas.RangeIndex(*values, name=name)
    if kind == "levels":
        return pandas.MultiIndex.from_arrays([_index(level) for level in values])
    of_index, frequency = values
    found = pandas.Index(_values(of_index), name=name, dtype=object if _has_objects(of_index) else None)
    if frequency is not None:
        found.freq = frequency
    return found


def _has_objects(content: Any) -> bool:
    """pandas would guess another dtype for them."""
    kind, values, *_ = content
    return kind == "numpy" and values.dtype == object


def _series_content(series: Any) -> list[Any]:
    return [_values_content(series), _index_content(series.index), series.name, series.attrs]


def _series(content: Any) -> Any:
    values, index, name, attrs = content
    found = _pandas().Series(_values(values), _index(index), name=name, dtype=object if _has_objects(values) else None)
    found.attrs = attrs
    return found


def _frame_content(frame: Any) -> list[Any]:
    columns = [_values_content(frame.iloc[:, place]) for place in range(frame.shape[1])]
    return [columns, _index_content(frame.columns), _index_content(frame.index), frame.attrs]


def _frame(content: Any) -> Any:
    """Columns by their places: two may have one name."""
    columns, names, index, attrs = content
    pandas, rows = _pandas(), _index(index)
    by_place = {
        place: pandas.Series(_values(values), rows, dtype=object if _has_objects(values) else None) for place, values in enumerate(columns)
    }
    found = pandas.DataFrame(by_place, rows)
    found.columns = _index(names)
    found.attrs = attrs
    return found


FORMS: dict[str, Form] = {
    "DataFrame": Form(lambda thing: _is("DataFrame", thing), _frame_content, _frame),
    "Series": Form(lambda thing: _is("Series", thing), _series_content, _series),
}
