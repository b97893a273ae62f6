"""Objects that ranks send each other as data: what comes back, and what is refused."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import random
import sys
import uuid
import warnings
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePosixPath
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch

from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.forms import FORMS
from hvdtrain.horovod.objects import packed, unpacked


def sent(thing: Any) -> Any:
    return unpacked(packed(thing, "test"))


class Pair(NamedTuple):
    one: int
    other: list[Any]


class Colour(Enum):
    RED = 1


THINGS: list[Any] = [
    {"a": [1, 2.5, None, True, "text"], 3: (b"\x00\xff", 1 + 2j), (1, 2): {4, 5}},
    OrderedDict([("z", frozenset({1})), ("a", np.float32(2.5))]),
    [
        Counter("aab"),
        defaultdict(list, a=[1]),
        deque([1, 2], maxlen=3),
        bytearray(b"x"),
        range(1, 9, 2),
        slice(None, 3),
    ],
    [
        Path("/a/b"),
        PurePosixPath("c"),
        Pair(1, [Path("d")]),
        Colour.RED,
        SimpleNamespace(a=1),
        np.int64(3),
        np.bool_(True),
    ],
    [datetime(2026, 11, 24, 1, 2, 3, 4, UTC), date(2026, 11, 24), timedelta(days=-1, seconds=5)],
    torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [2, 2, 5]).state_dict(),
    argparse.Namespace(lr=0.1, layers=[1, 2]),
    [torch.float16, torch.Size([2, 3]), torch.device("cpu")],
    np.arange(6).reshape(2, 3),
    float("inf"),
]


@pytest.mark.parametrize("thing", THINGS, ids=lambda thing: type(thing).__name__)
def test_objects_come_back_equal_and_of_the_same_classes(thing: Any) -> None:
    found = unpacked(packed(thing, "test"))
    assert type(found) is type(thing) and repr(found) == repr(thing)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int8]
)
def test_tensors_come_back_equal(dtype: torch.dtype) -> None:
    for tensor in (
        torch.arange(6).reshape(2, 3).to(dtype),
        torch.ones((), dtype=dtype),
        torch.ones(0, 2, dtype=dtype),
    ):
        found = unpacked(packed({"x": tensor}, "test"))["x"]
        assert (
            found.dtype == dtype and found.shape == tensor.shape and bool((found == tensor).all())
        )


class Own:
    """Of a class that no other rank may know."""


def test_an_object_of_ones_own_class_is_refused_with_what_to_send_instead() -> None:
    with pytest.raises(BadCall, match="an object of .*Own is not sent to other ranks") as raised:
        packed([Own()], "broadcast_object 'x'")
    assert (
        "numbers, strings, bytes" in raised.value.fix
        and raised.value.where == "broadcast_object 'x'"
    )


def test_what_is_refused_is_named_with_its_place() -> None:
    for thing, words in (
        ({"a": [1, Own()]}, r"Own is not sent .*, at object\['a'\]\[1\]"),
        (
            {"a": defaultdict(lambda: 1)},
            r"a.*defaultdict is not sent to other ranks: it has the default factory <function .*, "
            r"at object\['a'\]",
        ),
        (
            {"a": [Cached(2)]},
            r"Cached is not sent to other ranks: it has attributes that are no fields: more, at "
            r"object\['a'\]\[0\]",
        ),
        (
            [Slotted(a=1)],
            r"Slotted is not sent to other ranks: it has more in it than items and attributes, at "
            r"object\[0\]",
        ),
        (
            pd.DataFrame({"a": pd.interval_range(0, 2)}),
            r"a column of dtype interval.* is not sent|Interval is not sent",
        ),
    ):
        with pytest.raises(BadCall, match=words):
            packed(thing, "test")


def test_a_class_that_this_process_has_not_loaded_is_an_error() -> None:
    kind: Any = type("Elsewhere", (Pair,), {"__module__": "elsewhere"})
    with pytest.raises(BadCall, match="this rank has not loaded the class elsewhere.Elsewhere"):
        unpacked(packed(kind(1, []), "test"))


@dataclasses.dataclass
class Cached:
    """With code that must not run on the receiver."""

    a: int
    runs: Any = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs.append("made")
        if self.a == 2:
            self.more = 1

    @functools.cached_property
    def double(self) -> int:
        return 2 * self.a


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    cached: Cached
    path: Path


def test_a_dataclass_is_its_fields_and_none_of_its_code_runs() -> None:
    thing = Cached(1)
    assert thing.double == 2  # kept in the object, and no field
    thing.runs.append(torch.ones(2))
    found = sent([Frozen(thing, Path("a"))])[0]
    assert type(found) is Frozen and found.path == Path("a") and type(found.cached) is Cached
    assert (
        found.cached.a == 1
        and found.cached.runs[0] == "made"
        and len(found.cached.runs) == 2
        and found.cached.double == 2
    )


def test_a_dataclass_with_other_fields_here_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = packed(Cached(1), "test")
    monkeypatch.setattr(
        sys.modules[__name__], "Cached", dataclasses.make_dataclass("Cached", ["a"])
    )
    with pytest.raises(BadCall, match=r"Cached has other fields than \('a', 'runs'\)"):
        unpacked(content)
    monkeypatch.setattr(sys.modules[__name__], "Cached", Own)
    with pytest.raises(BadCall, match="Cached is no dataclass on this rank"):
        unpacked(content)
    monkeypatch.delattr(sys.modules[__name__], "Cached")
    with pytest.raises(
        BadCall,
        match="this rank has not loaded the class .*Cached\n.*\n  fix: import it on every rank",
    ):
        unpacked(content)


class Plain(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        raise AssertionError("code of the class has run")

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("code of the class has run")


class Itself(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Mirrored(OrderedDict[str, Any]):
    """As of easydict: attributes are the items."""

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value
        super().__setattr__(name, value)


class Slotted(dict[str, Any]):
    __slots__ = ("more",)


def test_dicts_of_other_classes_come_back_with_their_attributes() -> None:
    plain: Any = dict.__new__(Plain)
    itself: Any = Itself(a=[1])
    mirrored: Any = Mirrored()
    dict.__setitem__(plain, "a", 1)
    mirrored.x = {"deep": [1]}
    mirrored.y = 2
    found = sent({"plain": plain, "itself": itself, "mirrored": mirrored})
    assert type(found["plain"]) is Plain and dict(found["plain"]) == {"a": 1}
    assert (
        type(found["itself"]) is Itself
        and vars(found["itself"]) is found["itself"]
        and found["itself"] == {"a": [1]}
    )
    attributes = vars(found["mirrored"])
    assert type(found["mirrored"]) is Mirrored and list(found["mirrored"]) == ["x", "y"]
    assert attributes["x"] is found["mirrored"]["x"] and attributes["x"] == {"deep": [1]}


VALUES: list[Any] = [
    [
        Decimal("1.50"),
        Decimal("NaN"),
        Fraction(-1, 3),
        uuid.UUID(int=5),
        MappingProxyType({"a": [1]}),
    ],
    np.array([(1, (2.0, 3.0)), (4, (5.0, 6.0))], [("a", ">i4"), ("b", "f8", (2,))]),
    np.zeros(
        2,
        np.dtype({"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 16}),
    ),
    np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.rec.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")])[0],
    np.array([1, "a", None, {"x": np.float32(1)}], object).reshape(2, 2),
    np.ma.array([[1, 2], [3, 4]], mask=[[False, True], [False, False]], fill_value=7),
    np.ma.array([1.5, 2.5]),
    torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False),
    torch.tensor([[0.0, 1.0]]).to_sparse().requires_grad_(),
    torch.eye(4).to_sparse(1),
]


@pytest.mark.parametrize("thing", VALUES, ids=lambda thing: type(thing).__name__)
def test_values_of_libraries_come_back_equal_and_of_the_same_classes(thing: Any) -> None:
    found = sent(thing)
    assert type(found) is type(thing) and repr(found) == repr(thing)
    assert getattr(found, "dtype", None) == getattr(thing, "dtype", None)


def test_compressed_tensors_and_memory_come_back() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*beta state")
        one = torch.tensor([[1.0, 0, 0, 0], [0, 0, 2, 3], [0, 0, 0, 0], [4, 0, 0, 0]])
        for tensor in (
            one.to_sparse_csr(),
            one.to_sparse_csc(),
            one.to_sparse_bsr((2, 2)),
            one.to_sparse_bsc((2, 2)),
        ):
            found = sent(tensor)
            assert found.layout == tensor.layout and bool((found.to_dense() == one).all())
    memory = sent(np.arange(6.0).reshape(2, 3).data)
    assert (memory.format, memory.shape, memory.tolist()) == ("d", (2, 3), [[0, 1, 2], [3, 4, 5]])


def test_indices_of_a_sparse_tensor_are_checked() -> None:
    restore = FORMS["sparse tensor"].restore
    with pytest.raises(RuntimeError, match="size is inconsistent with indices"):
        restore(["coo", torch.tensor([[5]]), torch.ones(1), True, [2], False])
    with pytest.raises(RuntimeError, match="col_indices"):
        restore(
            [
                "torch.sparse_csr",
                (torch.tensor([0, 1]), torch.tensor([5])),
                torch.ones(1),
                None,
                [1, 2],
                False,
            ]
        )


DRAWS: list[tuple[Any, Callable[[Any], Any]]] = [
    *[
        (np.random.Generator(kind(3)), lambda found: (found.random(), found.spawn(1)[0].random()))
        for kind in (np.random.PCG64, np.random.MT19937, np.random.Philox, np.random.SFC64)
    ],
    (np.random.RandomState(3), lambda found: found.randn(3).tolist()),
    (random.Random(3), lambda found: found.random()),
    (torch.Generator().manual_seed(3), lambda found: torch.rand(3, generator=found).tolist()),
]


@pytest.mark.parametrize(("generator", "draw"), DRAWS, ids=lambda each: type(each).__name__)
def test_generators_go_on_from_where_they_are(generator: Any, draw: Callable[[Any], Any]) -> None:
    draw(generator)
    found = sent(generator)
    assert type(found) is type(generator) and draw(found) == draw(generator)


def tables() -> list[Any]:
    days = pd.to_datetime(["2020-01-01", "2021-01-01"])
    table = pd.DataFrame(
        {
            "int": [1, 2],
            "text": ["x", None],
            "float": [1.5, np.nan],
            "kind": pd.Categorical(["u", "v"], ["v", "u", "w"], ordered=True),
            "day": days,
            "zone": days.tz_localize("Europe/Berlin"),
            "nullable": pd.array([1, None], dtype="Int64"),
            "flag": pd.array([True, None], dtype="boolean"),
            "objects": np.array([1, ["q"]], object),
            "span": pd.to_timedelta([1, 2], unit="s"),
        }
    )
    table.attrs["source"] = "test"
    twice = table.rename(columns={"int": "text"})
    dated = table.set_index(pd.date_range("2020", periods=2, freq="D", name="when"))
    levels = pd.DataFrame(
        np.eye(2), columns=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["x", None])
    )
    return [
        table,
        table.set_index(["int", "text"]),
        twice,
        dated,
        levels,
        table[[]],
        table.iloc[:0],
        table["zone"],
        table["objects"],
    ]


@pytest.mark.parametrize("place", range(9))
def test_tables_come_back_as_their_columns(place: int) -> None:
    table = tables()[place]
    found = sent({"table": table})["table"]
    equal = (
        pd.testing.assert_frame_equal
        if isinstance(table, pd.DataFrame)
        else pd.testing.assert_series_equal
    )
    equal(found, table)
    assert found.attrs == table.attrs


def test_a_rank_without_pandas_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    content = packed(pd.DataFrame({"a": [1]}), "test")
    monkeypatch.delitem(sys.modules, "pandas")
    with pytest.raises(BadCall, match="this rank has not imported pandas"):
        unpacked(content)


@pytest.mark.parametrize("kind", ["model", "optimizer", "scheduler"])
def test_what_has_a_state_is_sent_by_it(kind: str) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    things = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
    }
    with pytest.raises(BadCall, match="is not sent to other ranks") as raised:
        packed(things[kind], "test")
    assert (
        raised.value.fix == "its state_dict(), which the others give to load_state_dict() of theirs"
    )


@pytest.mark.parametrize(
    "thing",
    [lambda: 1, functools.partial(max, 1), int, ValueError("x"), UserDict(a=1), sys],
    ids=lambda thing: type(thing).__name__,
)
def test_code_and_what_has_code_is_refused(thing: Any) -> None:
    with pytest.raises(BadCall, match="is not sent to other ranks"):
        packed(thing, "test")
