"""What ranks may send each other as objects: data, whose form says nothing of code, so that no rank runs what another one sends."""

from __future__ import annotations

import argparse
import base64
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.comm.signed.objects import pack, unpack
from hvdtrain.horovod.engine.errors import BadCall
from hvdtrain.horovod.engine.requests import name_of

_FIX = "numbers, strings, bytes, None, lists, tuples, sets, dicts, arrays, tensors; of an object of your own its __dict__ or state_dict()"


class _Tensor(NamedTuple):
    dtype: str
    array: np.ndarray  # its bytes where numpy has no such dtype
    shape: tuple[int, ...]
    requires_grad: bool


class _Scalar(NamedTuple):
    """Of numpy."""

    array: np.ndarray


class _Bytes(NamedTuple):
    text: str


class _Complex(NamedTuple):
    real: float
    imag: float


class _Set(NamedTuple):
    members: list[Any]
    is_frozen: bool


class _Ordered(NamedTuple):
    items: list[Any]


class _Namespace(NamedTuple):
    """Of argparse."""

    values: dict[Any, Any]


class _Torch(NamedTuple):
    """A dtype, device or Size."""

    kind: str
    value: Any


def packed(thing: Any, where: str) -> bytes:
    """Raises BadCall for an object of another class.

    Without a secret, as the tensors of the other calls: a stranger who can send to the ranks can change data, but not run code.
    """
    return pack(_plain(thing, where), "")


def unpacked(content: bytes) -> Any:
    """The object of packed(); tensors are in host memory."""
    return _restored(unpack(content, ""))


def _plain(thing: Any, where: str) -> Any:  # noqa: PLR0911 (one for each class)
    kind = type(thing)
    if thing is None or kind in (bool, int, float, str):
        return thing
    if kind in (list, tuple):
        return kind(_plain(inner, where) for inner in thing)
    if kind in (dict, OrderedDict):
        items = [(_plain(key, where), _plain(value, where)) for key, value in thing.items()]
        return dict(items) if kind is dict else _Ordered([list(item) for item in items])
    if kind in (set, frozenset):
        return _Set([_plain(inner, where) for inner in thing], kind is frozenset)
    if isinstance(thing, torch.Tensor) and not thing.is_sparse:
        return _of_tensor(thing)
    if kind is np.ndarray and not thing.dtype.hasobject:
        return thing
    if isinstance(thing, np.generic):
        return _Scalar(np.asarray(thing))
    if kind in (bytes, bytearray):
        return _Bytes(base64.b64encode(thing).decode())
    if kind is complex:
        return _Complex(thing.real, thing.imag)
    if kind is argparse.Namespace:
        return _Namespace(_plain(vars(thing), where))
    if kind in (torch.dtype, torch.device, torch.Size):
        return _Torch(kind.__name__, list(thing) if kind is torch.Size else str(thing).removeprefix("torch."))
    raise BadCall(f"an object of {kind.__module__}.{kind.__qualname__} is not sent to other ranks: {thing!r:.100}", where, _FIX)


def _of_tensor(tensor: torch.Tensor) -> _Tensor:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return _Tensor(name_of(tensor.dtype), flat.view(torch.uint8).numpy(), tuple(tensor.shape), tensor.requires_grad)


def _restored(thing: Any) -> Any:  # noqa: PLR0911
    match thing:
        case _Tensor():
            dtype = getattr(torch, thing.dtype)
            flat = torch.from_numpy(thing.array).view(dtype) if len(thing.array) else torch.empty(0, dtype=dtype)
            return flat.view(thing.shape).requires_grad_(thing.requires_grad)
        case _Scalar():
            return thing.array[()]
        case _Bytes():
            return base64.b64decode(thing.text)
        case _Complex():
            return complex(thing.real, thing.imag)
        case _Set():
            members = [_restored(inner) for inner in thing.members]
            return frozenset(members) if thing.is_frozen else set(members)
        case _Ordered():
            return OrderedDict((_restored(key), _restored(value)) for key, value in thing.items)
        case _Namespace():
            return argparse.Namespace(**_restored(thing.values))
        case _Torch():
            if thing.kind == "Size":
                return torch.Size(thing.value)
            return torch.device(thing.value) if thing.kind == "device" else getattr(torch, thing.value)
        case list() | tuple():
            return type(thing)(_restored(inner) for inner in thing)
        case dict():
            return {_restored(key): _restored(value) for key, value in thing.items()}
    return thing
