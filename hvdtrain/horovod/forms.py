"""Objects as plainer ones, and back: of Python's library, NumPy, torch and pandas, and of classes
that every rank has loaded."""

from __future__ import annotations

import dataclasses
import enum
import functools
import random
import sys
import uuid
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.horovod.engine.errors import BadCall


class Form(NamedTuple):
    """One kind of objects. Contents are of what has a form, or of plain values and containers."""

    fits: Callable[[Any], bool]
    content: Callable[[Any], Any]
    restore: Callable[[Any], Any]  # from the content; runs nothing that the sender chooses


def _is(kind: type) -> Callable[[Any], bool]:
    """Exactly: a class of the user's may have more in it."""
    return lambda thing: type(thing) is kind


def _is_structured(thing: Any) -> bool:
    """An array or scalar whose numbers have names, without objects in it."""
    known = type(thing) in (np.ndarray, np.recarray) or isinstance(thing, np.void)
    return known and thing.dtype.names is not None and not thing.dtype.hasobject


def _structured_content(thing: Any) -> list[Any]:
    array = np.asarray(thing)
    raw = np.frombuffer(array.tobytes(), np.uint8)
    kind = "scalar" if isinstance(thing, np.void) else type(thing).__name__
    return [
        kind,
        isinstance(thing, np.record),
        np.lib.format.dtype_to_descr(array.dtype),
        list(array.shape),
        raw,
    ]


def _structured(content: Any) -> Any:
    kind, is_record, described, shape, raw = content
    dtype = np.lib.format.descr_to_dtype(described)
    array = np.frombuffer(raw.tobytes(), dtype).reshape(shape).copy()
    if kind == "recarray":
        return array.view(np.recarray)
    if is_record:
        array = array.view(np.dtype((np.record, dtype)))
    return array[()] if kind == "scalar" else array


def _object_array(content: Any) -> np.ndarray:
    shape, members = content
    flat = np.empty(len(members), object)
    for place, member in enumerate(members):
        flat[place] = member
    return flat.reshape(shape)


def _masked(content: Any) -> Any:
    data, mask, fill_value, is_hard = content
    return np.ma.MaskedArray(
        data, np.ma.nomask if mask is None else mask, fill_value=fill_value, hard_mask=is_hard
    )


def _masked_content(thing: Any) -> list[Any]:
    mask = None if thing.mask is np.ma.nomask else np.asarray(thing.mask)
    return [np.asarray(thing.data), mask, thing.fill_value, bool(thing.hardmask)]


_BIT_GENERATORS = {
    kind.__name__: kind
    for kind in (
        np.random.PCG64,
        np.random.PCG64DXSM,
        np.random.MT19937,
        np.random.Philox,
        np.random.SFC64,
    )
}


def _is_generator(thing: Any) -> bool:
    """Whether this is a random generator of NumPy whose spawn() is known too."""
    if type(thing) is not np.random.Generator:
        return False
    bits = thing.bit_generator
    return type(bits) in _BIT_GENERATORS.values() and type(bits.seed_seq) is np.random.SeedSequence


def _generator(content: Any) -> np.random.Generator:
    state, seeds = content
    bits = _BIT_GENERATORS[state["bit_generator"]](seeds)
    bits.state = state
    return np.random.Generator(bits)


def _random_state(state: Any) -> np.random.RandomState:
    found = np.random.RandomState(0)
    found.set_state(state)
    return found


def _python_random(state: Any) -> random.Random:
    found = random.Random()
    found.setstate(state)
    return found


def _torch_generator(content: Any) -> torch.Generator:
    device, state = content
    found = torch.Generator(device)
    found.set_state(state)
    return found


_COMPRESSED = {
    str(layout): layout
    for layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}


def _is_sparse(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and (
        thing.layout == torch.sparse_coo or thing.layout in _COMPRESSED.values()
    )


def _sparse_content(tensor: torch.Tensor) -> list[Any]:
    plain = tensor.detach()
    more = [list(tensor.shape), tensor.requires_grad]
    if tensor.layout == torch.sparse_coo:
        return ["coo", plain._indices(), plain._values(), plain.is_coalesced(), *more]
    by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    indices = (
        (plain.crow_indices(), plain.col_indices())
        if by_rows
        else (plain.ccol_indices(), plain.row_indices())
    )
    return [str(tensor.layout), indices, plain.values(), None, *more]


def _sparse(content: Any) -> torch.Tensor:
    """Its indices are checked: no place outside of its memory is ever written to."""
    layout, indices, values, is_coalesced, shape, requires_grad = content
    if layout == "coo":
        found = torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=True, is_coalesced=is_coalesced
        )
    else:
        compressed, plain = indices
        found = torch.sparse_compressed_tensor(
            compressed, plain, values, shape, layout=_COMPRESSED[layout], check_invariants=True
        )
    return found.requires_grad_(requires_grad)


def _memory(content: Any) -> memoryview:
    text_format, shape, is_readonly, raw = content
    whole = memoryview(raw if is_readonly else bytearray(raw))
    return whole if text_format == "B" and len(shape) == 1 else whole.cast(text_format, shape)


def _pandas() -> Any:
    """Not imported for a table of another rank: where this one works with tables, it has."""
    found = sys.modules.get("pandas")
    if found is None:
        raise BadCall(
            "this rank has not imported pandas",
            "a table of another rank",
            "import pandas on every rank",
        )
    return found


def _is_table(name: str, thing: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and type(thing) is getattr(pandas, name)


def _values_content(values: Any) -> list[Any]:
    """Values of a Series or an Index: numbers of NumPy, categories, times of a zone, or a dtype
    that its name tells."""
    pandas = _pandas()
    dtype = values.dtype
    if isinstance(dtype, np.dtype):
        return ["numpy", np.asarray(values)]
    if isinstance(dtype, pandas.CategoricalDtype):
        array = values.array
        return [
            "categories",
            np.asarray(array.codes),
            _index_content(array.categories),
            bool(array.ordered),
        ]
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
        return [
            "levels",
            [_index_content(index.get_level_values(level)) for level in range(index.nlevels)],
            None,
        ]
    frequency = (
        index.freqstr if isinstance(index, (pandas.DatetimeIndex, pandas.TimedeltaIndex)) else None
    )
    return ["values", [_values_content(index), frequency], index.name]


def _index(content: Any) -> Any:
    pandas, (kind, values, name) = _pandas(), content
    if kind == "range":
        return pandas.RangeIndex(*values, name=name)
    if kind == "levels":
        return pandas.MultiIndex.from_arrays([_index(level) for level in values])
    of_index, frequency = values
    found = pandas.Index(
        _values(of_index), name=name, dtype=object if _has_objects(of_index) else None
    )
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
    found = _pandas().Series(
        _values(values), _index(index), name=name, dtype=object if _has_objects(values) else None
    )
    found.attrs = attrs
    return found


def _frame_content(frame: Any) -> list[Any]:
    columns = [_values_content(frame.iloc[:, place]) for place in range(frame.shape[1])]
    return [columns, _index_content(frame.columns), _index_content(frame.index), frame.attrs]


def _frame(content: Any) -> Any:
    """Columns by their places: two may have one name."""
    columns, names, index, attrs = content
    pandas = _pandas()
    rows = _index(index)
    by_place = {
        place: pandas.Series(_values(values), rows, dtype=object if _has_objects(values) else None)
        for place, values in enumerate(columns)
    }
    found = pandas.DataFrame(by_place, rows)
    found.columns = _index(names)
    found.attrs = attrs
    return found


FORMS: dict[str, Form] = {
    "Decimal": Form(_is(Decimal), str, Decimal),
    "Fraction": Form(
        _is(Fraction),
        lambda thing: [thing.numerator, thing.denominator],
        lambda content: Fraction(*content),
    ),
    "UUID": Form(_is(uuid.UUID), lambda thing: thing.hex, uuid.UUID),
    "mappingproxy": Form(_is(MappingProxyType), dict, MappingProxyType),
    "memoryview": Form(
        _is(memoryview),
        lambda thing: [thing.format, list(thing.shape), thing.readonly, thing.tobytes()],
        _memory,
    ),
    "Random": Form(_is(random.Random), lambda thing: thing.getstate(), _python_random),
    "structured array": Form(_is_structured, _structured_content, _structured),
    "object array": Form(
        lambda thing: type(thing) is np.ndarray and thing.dtype == object,
        lambda thing: [list(thing.shape), list(thing.flat)],
        _object_array,
    ),
    "masked array": Form(_is(np.ma.MaskedArray), _masked_content, _masked),
    "SeedSequence": Form(
        _is(np.random.SeedSequence),
        lambda thing: thing.state,
        lambda state: np.random.SeedSequence(**state),
    ),
    "Generator": Form(
        _is_generator,
        lambda thing: [thing.bit_generator.state, thing.bit_generator.seed_seq],
        _generator,
    ),
    "RandomState": Form(
        _is(np.random.RandomState), lambda thing: thing.get_state(legacy=True), _random_state
    ),
    "torch.Generator": Form(
        _is(torch.Generator), lambda thing: [thing.device.type, thing.get_state()], _torch_generator
    ),
    "sparse tensor": Form(_is_sparse, _sparse_content, _sparse),
    "Parameter": Form(
        lambda thing: (
            type(thing) is torch.nn.Parameter
            and thing.layout == torch.strided
            and not thing.is_quantized
        ),
        lambda thing: [thing.detach(), thing.requires_grad],
        lambda content: torch.nn.Parameter(*content),
    ),
    "DataFrame": Form(lambda thing: _is_table("DataFrame", thing), _frame_content, _frame),
    "Series": Form(lambda thing: _is_table("Series", thing), _series_content, _series),
}


# of classes that every rank has loaded; none of their code runs
# of a defaultdict
FACTORIES = {
    kind.__name__: kind
    for kind in (int, float, bool, str, list, dict, set, tuple, Counter, OrderedDict)
}
# a class before those it is made from
_DICTS: tuple[type[dict[Any, Any]], ...] = (
    defaultdict,
    Counter,
    OrderedDict,
    dict,
)
_WHERE = "an object of another rank"
_FIX = "the same class on every rank"


class Path(NamedTuple):
    """By which every rank finds a class."""

    module: str
    name: str


class Refused(Exception):
    """What of an object would be lost, in words that go behind its class."""


def path_of(kind: type) -> Path:
    return Path(kind.__module__, kind.__qualname__)


def loaded(path: Path, base: type) -> Any:
    """A class that this process has loaded; nothing is imported for it, which would run code."""
    found: Any = sys.modules.get(path.module)
    for part in path.name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise BadCall(
            f"this rank has not loaded the class {path.module}.{path.name}",
            _WHERE,
            "import it on every rank",
        )
    return found


def is_named_tuple(thing: Any) -> bool:
    return isinstance(thing, tuple) and hasattr(type(thing), "_fields")


def named_tuple(path: Path, fields: tuple[str, ...], values: list[Any]) -> Any:
    kind = loaded(path, tuple)
    _check_fields(path, tuple(getattr(kind, "_fields", ())), fields)
    return tuple.__new__(kind, values)


def member(path: Path, name: str) -> Any:
    return loaded(path, enum.Enum).__members__[name]


def is_dataclass(thing: Any) -> bool:
    """An object of one that object() alone makes, and no built-in class that has a state of its
    own."""
    kind = type(thing)
    return dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__


def fields_of(thing: Any) -> dict[str, Any]:
    """The fields of a dataclass. Raises Refused where it has attributes beside them; cached
    properties are found again."""
    fields = {field.name: getattr(thing, field.name) for field in dataclasses.fields(thing)}
    kept = set(_slots(type(thing))) | {
        name for name in getattr(thing, "__dict__", {}) if not _is_cached(type(thing), name)
    }
    if more := sorted(name for name in kept - set(fields) if hasattr(thing, name)):
        raise Refused(f"has attributes that are no fields: {', '.join(more[:8])}")
    return fields


def dataclass(path: Path, values: dict[str, Any]) -> Any:
    kind = loaded(path, object)
    if not (dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__):
        raise BadCall(f"{path.module}.{path.name} is no dataclass on this rank", _WHERE, _FIX)
    _check_fields(path, tuple(field.name for field in dataclasses.fields(kind)), tuple(values))
    found: Any = object.__new__(loaded(path, object))
    for name, value in values.items():
        object.__setattr__(found, name, value)
    return found


class Dict(NamedTuple):
    """What a dict of a class beside dict has, its items apart."""

    base: str  # of Python's own, from which the class is made
    path: Path | None  # of a class that is none of Python's
    factory: str | None  # of a defaultdict
    is_its_attributes: bool  # self.__dict__ = self
    mirrored: list[str]  # attributes that are the items of the same name
    attributes: dict[str, Any]  # the others


def dict_of(thing: dict[Any, Any]) -> Dict:
    """Raises Refused where something of it would be lost."""
    kind = type(thing)
    base = next(each for each in _DICTS if isinstance(thing, each))
    if kind.__new__ is not base.__new__ or any(_slots(kind)):
        raise Refused("has more in it than items and attributes")
    factory = thing.default_factory if isinstance(thing, defaultdict) else None
    if factory is not None and factory not in FACTORIES.values():
        raise Refused(f"has the default factory {factory!r:.80}")
    factory_name = None if factory is None else factory.__name__
    path = None if kind is base else path_of(kind)
    attributes = getattr(thing, "__dict__", {})
    if attributes is thing:
        return Dict(base.__name__, path, factory_name, True, [], {})
    mirrored = [
        name
        for name, value in attributes.items()
        if name in thing and dict.__getitem__(thing, name) is value
    ]
    return Dict(
        base.__name__,
        path,
        factory_name,
        False,
        mirrored,
        {k: v for k, v in attributes.items() if k not in mirrored},
    )


def restored_dict(form: Dict, items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    base: Any = next(kind for kind in _DICTS if kind.__name__ == form.base)
    kind = base if form.path is None else loaded(form.path, base)
    if kind.__new__ is not base.__new__:
        raise BadCall(f"{kind.__qualname__} is made in another way on this rank", _WHERE, _FIX)
    found: Any = base.__new__(kind)
    if isinstance(found, defaultdict) and form.factory is not None:
        found.default_factory = FACTORIES[form.factory]
    put = OrderedDict.__setitem__ if isinstance(found, OrderedDict) else dict.__setitem__
    for key, value in items:
        put(found, key, value)
    if form.is_its_attributes:
        object.__setattr__(found, "__dict__", found)
    elif form.mirrored or form.attributes:
        found.__dict__.update(
            {name: dict.__getitem__(found, name) for name in form.mirrored}, **form.attributes
        )
    return found


def _check_fields(path: Path, own: tuple[str, ...], sent: tuple[str, ...]) -> None:
    if own != sent:
        raise BadCall(f"{path.module}.{path.name} has other fields than {sent}", _WHERE, _FIX)


def _slots(kind: type) -> list[str]:
    """Names of attributes that are not in __dict__, of classes written in Python."""
    found: list[str] = []
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _is_cached(kind: type, name: str) -> bool:
    return isinstance(getattr(kind, name, None), functools.cached_property)
