"""Objects of one rank, or of each, on all: as data, whose form says nothing of code, so that no
rank runs what another one sends."""

from __future__ import annotations

import argparse
import base64
import datetime
import enum
from collections import deque
from pathlib import Path, PurePath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.comm.signed import pack, unpack
from hvdtrain.errors import first_line
from hvdtrain.horovod import forms
from hvdtrain.horovod.basics import ProcessSet, global_process_set
from hvdtrain.horovod.collectives import allgather
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.requests import name_of
from hvdtrain.horovod.job import JOB


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of rank `root_rank`, on that rank itself. It is sent as data (JSON, tensors as
    bytes), never as pickled code.

    Raises ValueError on every rank where the object is no data: an instance of a class of one's
    own.
    """
    where = f"broadcast_object {name!r}"
    ranks = process_set.ranks or []
    if root_rank not in ranks:
        raise BadCall(
            f"invalid root rank {root_rank} for the process set of ranks {ranks[:16]}",
            where,
            "one of these ranks",
        )
    is_root = JOB.engine.rank == root_rank
    content = _as_bytes(_to_send(obj, where) if is_root else b"")
    # roots that differ are told
    of_root = (
        f"{JOB.name('broadcast_object', name, process_set.process_set_id)} of rank {root_rank}"
    )
    found = allgather(content, of_root, process_set)
    sent = _received(found, where)
    return obj if is_root else sent


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """The objects of all ranks, in their order, as broadcast_object() sends them."""
    name = JOB.name("allgather_object", name, process_set.process_set_id)
    where = f"allgather_object {name!r}"
    content = _as_bytes(_to_send(obj, where))
    lengths = allgather(
        torch.tensor([len(content)], device="cpu"), f"{name}.lengths", process_set
    ).tolist()
    parts = allgather(content, name, process_set).split(lengths)
    return [_received(part, where) for part in parts]


def _to_send(obj: Any, where: str) -> bytes:
    """The bytes to send; of an object that cannot be sent the error, which every rank raises: the
    others wait for something."""
    try:
        return b"+" + packed(obj, where)
    except BadCall as error:
        return b"-" + packed((f"rank {JOB.engine.rank}: {error.what}", error.fix), where)
    except Exception as error:  # as the RecursionError of a list that contains itself
        what = (
            f"rank {JOB.engine.rank}: {type(obj).__name__} cannot be sent: "
            f"{type(error).__name__}: {first_line(error)}"
        )
        return b"-" + packed((what, "plain values, arrays and tensors in containers"), where)


def _received(content: torch.Tensor, where: str) -> Any:
    found = content.numpy().tobytes()
    if found[:1] == b"-":
        what, fix = unpacked(found[1:])
        raise BadCall(what, where, fix)
    return unpacked(found[1:])


def _as_bytes(content: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


_AS_THEY_ARE = frozenset((type(None), bool, int, float, str))
_FIX = (
    "numbers, strings, bytes, None, paths, containers, dataclasses, arrays, tensors, tables; of "
    "an object of your own its __dict__"
)
_FIX_STATE = "its state_dict(), which the others give to load_state_dict() of theirs"
_TIMES = {kind.__name__: kind for kind in (datetime.datetime, datetime.date, datetime.time)}


class _Tensor(NamedTuple):
    dtype: str
    array: np.ndarray  # its bytes where numpy has no such dtype
    shape: tuple[int, ...]
    requires_grad: bool


class _Scalar(NamedTuple):
    """A scalar of numpy."""

    array: np.ndarray


class _Bytes(NamedTuple):
    text: str
    is_array: bool  # a bytearray


class _Complex(NamedTuple):
    real: float
    imag: float


class _Set(NamedTuple):
    members: list[Any]
    is_frozen: bool


class _Dict(NamedTuple):
    """A dict of another class than dict, or with keys that are no plain values."""

    form: list[Any]  # of forms.Dict
    items: list[Any]


class _Deque(NamedTuple):
    members: list[Any]
    most: int | None


class _Fields(NamedTuple):
    """A named tuple, of a class that the receiver has loaded too."""

    module: str
    name: str
    fields: tuple[str, ...]
    values: list[Any]


class _Member(NamedTuple):
    """A member of an Enum that the receiver has loaded too."""

    module: str
    name: str
    member: str


class _Flags(NamedTuple):
    """Several members of a Flag that the receiver has loaded too."""

    module: str
    name: str
    value: Any


class _Dataclass(NamedTuple):
    """A dataclass object of a class that the receiver has loaded too."""

    module: str
    name: str
    fields: dict[str, Any]


class _Form(NamedTuple):
    """What forms.FORMS has."""

    kind: str
    content: Any


class _Range(NamedTuple):
    kind: str  # range or slice
    bounds: list[Any]


class _Path(NamedTuple):
    text: str
    is_of_files: bool  # Path, not PurePath


class _Time(NamedTuple):
    kind: str
    text: str


class _Span(NamedTuple):
    """A timedelta."""

    days: int
    seconds: int
    microseconds: int


class _Namespace(NamedTuple):
    """A namespace of argparse, or types.SimpleNamespace."""

    values: dict[Any, Any]
    is_simple: bool


class _Torch(NamedTuple):
    """A dtype, device or Size."""

    kind: str
    value: Any


def packed(thing: Any, where: str) -> bytes:
    """Raises BadCall for an object of another class.

    Without a secret, as the tensors of the other calls: a stranger who can send to the ranks can
    change data, but not run code.
    """
    return pack(_plain(thing, where), "")


def unpacked(content: bytes) -> Any:
    """The object of packed(); tensors are in host memory."""
    return _restored(unpack(content, ""))


def _plain(thing: Any, where: str, place: str = "") -> Any:  # noqa: PLR0911 (one for each class)
    """place: of the thing in the object that is sent, as "['optimizer'][0]"."""
    kind = type(thing)
    if kind in _AS_THEY_ARE:
        return thing
    if kind in (list, tuple):
        return kind(_members(thing, where, place))
    if isinstance(thing, dict):
        return _of_dict(thing, where, place)
    if kind in (set, frozenset):
        return _Set(_members(thing, where, place), kind is frozenset)
    if kind is deque:
        return _Deque(_members(thing, where, place), thing.maxlen)
    if (
        name := next((name for name, form in forms.FORMS.items() if form.fits(thing)), None)
    ) is not None:
        return _Form(name, _plain(_content(forms.FORMS[name], thing, where, place), where, place))
    if isinstance(thing, torch.Tensor) and thing.layout == torch.strided and not thing.is_quantized:
        return _of_tensor(thing)
    if kind is np.ndarray and not thing.dtype.hasobject:
        return thing
    if isinstance(thing, np.generic) and not thing.dtype.hasobject:
        return _Scalar(np.asarray(thing))
    if isinstance(thing, PurePath):
        return _Path(str(thing), isinstance(thing, Path))
    if isinstance(thing, enum.Enum) or forms.is_named_tuple(thing) or forms.is_dataclass(thing):
        return _of_class(thing, where, place)
    return _plain_value(thing, where, place)


def _plain_value(thing: Any, where: str, place: str) -> Any:  # noqa: PLR0911
    """The form of what has no members of any class."""
    kind = type(thing)
    if kind in (bytes, bytearray):
        return _Bytes(base64.b64encode(thing).decode(), kind is bytearray)
    if kind is complex:
        return _Complex(thing.real, thing.imag)
    if kind in (argparse.Namespace, SimpleNamespace):
        return _Namespace(_plain(vars(thing), where, place), kind is SimpleNamespace)
    if kind in (torch.dtype, torch.device, torch.Size):
        return _Torch(
            kind.__name__, list(thing) if kind is torch.Size else str(thing).removeprefix("torch.")
        )
    if kind in (range, slice):
        return _Range(kind.__name__, _members((thing.start, thing.stop, thing.step), where, place))
    if kind in _TIMES.values():
        return _Time(kind.__name__, thing.isoformat())
    if kind is datetime.timedelta:
        return _Span(thing.days, thing.seconds, thing.microseconds)
    at = f", at object{place}" if place else ""
    has_state = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    what = (
        f"an object of {kind.__module__}.{kind.__qualname__} is not sent to other ranks: "
        f"{thing!r:.100}{at}"
    )
    raise BadCall(what, where, _FIX_STATE if has_state else _FIX)


def _content(form: forms.Form, thing: Any, where: str, place: str) -> Any:
    try:
        return form.content(thing)
    except ValueError as error:
        raise BadCall(
            f"{error} is not sent to other ranks, at object{place}", where, _FIX
        ) from None


def _of_class(thing: Any, where: str, place: str) -> _Member | _Flags | _Fields | _Dataclass:
    kind = type(thing)
    path = forms.path_of(type(thing))
    if isinstance(thing, enum.Enum):
        if thing.name not in kind.__members__:  # flags together
            return _Flags(*path, _plain(thing.value, where, place))
        return _Member(*path, str(thing.name))
    if forms.is_named_tuple(thing):
        return _Fields(*path, tuple(kind._fields), _members(thing, where, place))
    try:
        fields = forms.fields_of(thing)
    except forms.Refused as error:
        raise _refusal(
            thing,
            error,
            where,
            place,
            "make them fields; or send its fields: dataclasses.asdict(...)",
        ) from None
    return _Dataclass(
        *path, {name: _plain(value, where, f"{place}.{name}") for name, value in fields.items()}
    )


def _refusal(thing: Any, why: forms.Refused, where: str, place: str, fix: str) -> BadCall:
    kind = type(thing)
    return BadCall(
        f"an object of {kind.__module__}.{kind.__qualname__} is not sent to other ranks: it "
        f"{why}, at object{place}",
        where,
        fix,
    )


def _members(things: Any, where: str, place: str) -> list[Any]:
    if _AS_THEY_ARE.issuperset(
        map(type, things)
    ):  # as the indices of a sampler, of which there may be millions
        return list(things)
    return [_plain(inner, where, f"{place}[{index}]") for index, inner in enumerate(things)]


def _of_dict(thing: dict[Any, Any], where: str, place: str) -> Any:
    kind = type(thing)
    items = [
        (_plain(key, where, place), _plain(value, where, f"{place}[{key!r:.40}]"))
        for key, value in thing.items()
    ]
    if kind is dict and _AS_THEY_ARE.issuperset(map(type, thing)):
        return dict(items)
    try:
        form = forms.dict_of(thing)
    except forms.Refused as error:
        raise _refusal(thing, error, where, place, "dict(...) of it") from None
    form = form._replace(
        attributes={
            name: _plain(value, where, f"{place}.{name}") for name, value in form.attributes.items()
        }
    )
    return _Dict(list(form), [list(item) for item in items])


def _of_tensor(tensor: torch.Tensor) -> _Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return _Tensor(
        name_of(tensor.dtype),
        flat.view(torch.uint8).numpy(),
        tuple(tensor.shape),
        tensor.requires_grad,
    )


def _restored(thing: Any) -> Any:  # noqa: PLR0911, PLR0912
    match thing:
        case _Tensor():
            dtype = getattr(torch, thing.dtype)
            flat = (
                torch.from_numpy(thing.array).view(dtype)
                if len(thing.array)
                else torch.empty(0, dtype=dtype, device="cpu")
            )
            return flat.view(thing.shape).requires_grad_(thing.requires_grad)
        case _Scalar():
            return thing.array[()]
        case _Bytes():
            content = base64.b64decode(thing.text)
            return bytearray(content) if thing.is_array else content
        case _Complex():
            return complex(thing.real, thing.imag)
        case _Set():
            members = [_restored(inner) for inner in thing.members]
            return frozenset(members) if thing.is_frozen else set(members)
        case _Dict():
            return _restored_dict(thing)
        case _Deque():
            return deque((_restored(inner) for inner in thing.members), thing.most)
        case _Fields():
            values = [_restored(value) for value in thing.values]
            return forms.named_tuple(forms.Path(thing.module, thing.name), thing.fields, values)
        case _Member():
            return forms.member(forms.Path(thing.module, thing.name), thing.member)
        case _Flags():
            return forms.loaded(forms.Path(thing.module, thing.name), enum.Flag)(thing.value)
        case _Dataclass():
            fields = {name: _restored(value) for name, value in thing.fields.items()}
            return forms.dataclass(forms.Path(thing.module, thing.name), fields)
        case _Form():
            return forms.FORMS[thing.kind].restore(_restored(thing.content))
        case _Range():
            return (range if thing.kind == "range" else slice)(*_restored(thing.bounds))
        case _Path():
            return (Path if thing.is_of_files else PurePath)(thing.text)
        case _Time():
            return _TIMES[thing.kind].fromisoformat(thing.text)
        case _Span():
            return datetime.timedelta(*thing)
        case _Namespace():
            return (SimpleNamespace if thing.is_simple else argparse.Namespace)(
                **_restored(thing.values)
            )
        case _Torch():
            if thing.kind == "Size":
                return torch.Size(thing.value)
            return (
                torch.device(thing.value) if thing.kind == "device" else getattr(torch, thing.value)
            )
        case list() | tuple():
            if _AS_THEY_ARE.issuperset(map(type, thing)):
                return thing
            return type(thing)(_restored(inner) for inner in thing)
        case dict():
            return {_restored(key): _restored(value) for key, value in thing.items()}
    return thing


def _restored_dict(thing: _Dict) -> dict[Any, Any]:
    form = forms.Dict(*thing.form)
    form = form._replace(
        attributes={name: _restored(value) for name, value in form.attributes.items()}
    )
    return forms.restored_dict(
        form, [(_restored(key), _restored(value)) for key, value in thing.items]
    )
