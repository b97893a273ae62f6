"""Sends objects of one rank, or of each rank, to all ranks: pickled over MPI, or signed with the
job's secret; else as data, so that no rank runs code from a stranger."""

from __future__ import annotations

import base64
import io
import pickle  # only between ranks of one job: over MPI, or after the signature was checked
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hvdtrain.comm.rendezvous import SECRET
from hvdtrain.comm.signed import Forged, pack, sign, signed_content, unpack
from hvdtrain.errors import first_line
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
    """Returns the object of rank `root_rank` on every rank; the root gets its own object. Tensors
    arrive in host memory.

    Raises ValueError on every rank if the object cannot be sent.
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
    # different roots are reported
    of_root = (
        f"{JOB.name('broadcast_object', name, process_set.process_set_id)} of rank {root_rank}"
    )
    content = _as_bytes(_to_send(obj, of_root, where) if is_root else b"")
    found = allgather(content, of_root, process_set)
    sent = _received(found, of_root, where)
    return obj if is_root else sent


def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns the objects of all ranks in rank order, sent like in broadcast_object()."""
    name = JOB.name("allgather_object", name, process_set.process_set_id)
    where = f"allgather_object {name!r}"
    content = _as_bytes(_to_send(obj, f"{name} of rank {JOB.engine.rank}", where))
    lengths = allgather(
        torch.tensor([len(content)], device="cpu"), f"{name}.lengths", process_set
    ).tolist()
    parts = allgather(content, name, process_set).split(lengths)
    return [
        _received(part, f"{name} of rank {rank}", where)
        for rank, part in zip(process_set.ranks or [], parts, strict=True)
    ]


class _Failure(NamedTuple):
    """Sent instead of an object that cannot be sent, so that every rank raises the error."""

    what: str
    fix: str


def _to_send(obj: Any, purpose: str, where: str) -> bytes:
    secret = JOB.engine.secret
    try:
        return to_bytes(obj, secret, purpose, where)
    except BadCall as error:
        failure = _Failure(f"rank {JOB.engine.rank}: {error.what}", error.fix)
    except Exception as error:  # such as the RecursionError of a list that contains itself
        failure = _Failure(
            f"rank {JOB.engine.rank}: {type(obj).__name__} cannot be sent: "
            f"{type(error).__name__}: {first_line(error)}",
            "what pickle takes: values, and objects of classes that every rank can import",
        )
    return to_bytes(failure, secret, purpose, where)


def _received(content: torch.Tensor, purpose: str, where: str) -> Any:
    obj = from_bytes(content.numpy().tobytes(), JOB.engine.secret, purpose, where)
    if isinstance(obj, _Failure):
        raise BadCall(obj.what, where, obj.fix)
    return obj


def _as_bytes(content: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if content
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def to_bytes(thing: Any, secret: str | None, purpose: str, where: str) -> bytes:
    """Serializes an object. secret: Engine.secret. Raises BadCall if it is empty and the object is
    not plain data, and pickle's errors."""
    if secret == "":
        return pack(plain(thing, where), "", purpose)
    file = io.BytesIO()
    _Pickler(file).dump(thing)
    pickled = file.getvalue()
    return pickled if secret is None else sign(pickled, secret, purpose)


def from_bytes(content: bytes, secret: str | None, purpose: str, where: str) -> Any:
    """Returns the object from to_bytes(); tensors are in host memory.

    Raises BadCall, before anything is unpickled, if the job did not sign it.
    """
    try:
        if secret == "":
            return _unpacked(content, purpose)
        pickled = content if secret is None else signed_content(content, secret, purpose)
    except Forged:
        raise BadCall(
            f"{purpose} is not signed with the job's secret",
            where,
            f"give every rank the same {SECRET}",
        ) from None
    try:
        return pickle.loads(pickled)
    except Exception as error:  # the constructor of a user's class may raise anything
        raise BadCall(
            f"this rank cannot load the object of {purpose}: {type(error).__name__}: "
            f"{first_line(error)}",
            where,
            "the same modules and classes on every rank, and objects that pickle.loads() can load",
        ) from error


def _unpacked(content: bytes, purpose: str) -> Any:
    found = unpack(content, "", purpose)
    try:
        return _restored(found)
    except Exception as error:  # a stranger can sign, too
        raise Forged from error


class _Tensor(NamedTuple):
    dtype: str
    array: np.ndarray  # its bytes
    shape: tuple[int, ...]
    requires_grad: bool


def _of_tensor(tensor: torch.Tensor) -> _Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return _Tensor(
        name_of(tensor.dtype),
        flat.view(torch.uint8).numpy(),
        tuple(tensor.shape),
        tensor.requires_grad,
    )


def _tensor(dtype: str, array: np.ndarray, shape: tuple[int, ...], grad: bool) -> torch.Tensor:
    kind = _dtype(dtype)
    flat = (
        torch.from_numpy(array).view(kind)
        if len(array)
        else torch.empty(0, dtype=kind, device="cpu")
    )
    return flat.view(shape).requires_grad_(grad)


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(name)
    return dtype


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


class _Pickler(pickle.Pickler):
    """Pickles tensors in host memory: the receiver may not have the sender's device. Of a view,
    only its numbers are sent, not the whole storage."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor:
            return NotImplemented
        if _is_dense(thing):
            return _tensor, tuple(_of_tensor(thing))
        return NotImplemented if thing.is_cpu else thing.cpu().__reduce_ex__(2)


class _Scalar(NamedTuple):
    """A scalar of NumPy."""

    array: np.ndarray


class _Dict(NamedTuple):
    """A dict with any keys, or an OrderedDict; the attributes of a module's state_dict() are the
    versions of its layers."""

    items: list[Any]
    attributes: dict[str, Any] | None  # attributes of an OrderedDict


class _Made(NamedTuple):
    """An object of a class in _FORMS."""

    name: str  # name of the class
    content: Any


class _Codec(NamedTuple):
    """Converts an object to lists, strings and a dict, and back."""

    content: Callable[[Any], Any]
    make: Callable[[Any], Any]


def _encoded(thing: bytes | bytearray) -> str:
    return base64.b64encode(thing).decode()


_FORMS = {
    bytes: _Codec(_encoded, base64.b64decode),
    bytearray: _Codec(_encoded, lambda content: bytearray(base64.b64decode(content))),
    set: _Codec(list, set),
    frozenset: _Codec(list, frozenset),
    Counter: _Codec(dict, Counter),
    range: _Codec(lambda thing: [thing.start, thing.stop, thing.step], lambda each: range(*each)),
    complex: _Codec(lambda thing: [thing.real, thing.imag], lambda parts: complex(*parts)),
    torch.dtype: _Codec(lambda thing: f"{thing}".removeprefix("torch."), _dtype),
    torch.device: _Codec(str, torch.device),
    torch.Size: _Codec(list, torch.Size),
    torch.nn.Parameter: _Codec(
        lambda thing: thing.data.requires_grad_(thing.requires_grad),
        lambda tensor: torch.nn.Parameter(tensor, tensor.requires_grad),
    ),
}
_BY_NAME = {kind.__name__: form for kind, form in _FORMS.items()}


_AS_THEY_ARE = frozenset((type(None), bool, int, float, str))


def plain(thing: Any, where: str, place: str = "") -> Any:  # noqa: PLR0911 (one for each class)
    """Converts an object for pack(). Raises BadCall for anything but plain values, arrays, tensors,
    and containers of them.

    place: of the thing in the object that is sent, such as "['optimizer'][0]".
    """
    kind = type(thing)
    if kind in _AS_THEY_ARE or isinstance(thing, (Path, _Failure)):
        return thing
    if kind in (list, tuple):
        return kind(_members(thing, where, place))
    if kind is dict:
        items = _items(thing, where, place)
        return dict(items) if _AS_THEY_ARE.issuperset(map(type, thing)) else _Dict(items, None)
    if kind is OrderedDict:
        return _Dict(_items(thing, where, place), plain(vars(thing), where, f"{place}.__dict__"))
    if kind in _FORMS:
        return _Made(kind.__name__, plain(_FORMS[kind].content(thing), where, place))
    if kind is torch.Tensor and _is_dense(thing):
        return _of_tensor(thing)
    if isinstance(thing, (np.ndarray, np.generic)) and thing.dtype.kind not in "OV":
        return thing if kind is np.ndarray else _Scalar(np.asarray(thing))
    at = f", at object{place}" if place else ""
    raise BadCall(
        f"an object of {kind.__module__}.{kind.__qualname__} cannot be sent over an unsigned "
        f"connection: {thing!r:.100}{at}",
        where,
        f"give every rank the same {SECRET}, or use MPI; or send it as numbers, strings, bytes, "
        "lists, tuples, dicts, arrays and tensors",
    )


def _members(things: Any, where: str, place: str) -> list[Any]:
    if _AS_THEY_ARE.issuperset(
        map(type, things)
    ):  # such as the indices of a sampler, which may be millions
        return list(things)
    return [plain(inner, where, f"{place}[{index}]") for index, inner in enumerate(things)]


def _items(thing: dict[Any, Any], where: str, place: str) -> list[Any]:
    return [
        (plain(key, where, place), plain(value, where, f"{place}[{key!r:.40}]"))
        for key, value in thing.items()
    ]


def _restored(thing: Any) -> Any:  # noqa: PLR0911
    match thing:
        case _Failure():
            return thing
        case _Tensor():
            return _tensor(*thing)
        case _Scalar():
            return thing.array[()]
        case _Made():
            if isinstance(thing.content, _Made):  # a set of a range that fills the memory
                raise TypeError(thing.name)
            return _BY_NAME[thing.name].make(_restored(thing.content))
        case _Dict():
            items = [(_restored(key), _restored(value)) for key, value in thing.items]
            if thing.attributes is None:
                return dict(items)
            restored = OrderedDict(items)
            vars(restored).update(_restored(thing.attributes))
            return restored
        case list() | tuple():
            return type(thing)(_restored(inner) for inner in thing)
        case dict():
            return {_restored(key): _restored(value) for key, value in thing.items()}
    return thing
