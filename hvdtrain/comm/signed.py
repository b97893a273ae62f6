"""Small objects as signed JSON: how ranks send each other data on connections that strangers may
reach. Pickle is not used because it could run code.

Supports plain values, arrays, paths and hvdtrain's value classes: NamedTuples, dataclasses and
UserErrors.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import hmac
import json
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.errors import UserError

TAG_BYTES = 32
_OWN = __name__.partition(".")[0]


class Forged(Exception):
    """The bytes were not signed by a rank of this job."""


def pack(thing: Any, secret: str, purpose: str = "") -> bytes:
    """Packs the object into bytes that only a process with the secret can create; unpack() with
    another purpose rejects them.

    Raises TypeError for an object of another class.
    """
    return sign(json.dumps(_plain(thing)).encode(), secret, purpose)


def unpack(packed: bytes, secret: str, purpose: str = "") -> Any:
    """Returns the object that pack() packed. Raises Forged if the secret or the purpose differs, or
    the bytes were changed."""
    text = signed_content(packed, secret, purpose)
    try:
        return _object(json.loads(text))
    except Exception as error:
        raise Forged from error  # without a secret a stranger can sign, too


def sign(content: bytes, secret: str, purpose: str) -> bytes:
    """Returns a tag that only a process with the secret can compute, followed by the content."""
    return _tag(content, secret, purpose) + content


def signed_content(signed: bytes, secret: str, purpose: str) -> bytes:
    """Returns the content that sign() signed. Raises Forged as unpack() does."""
    content = signed[TAG_BYTES:]
    if not hmac.compare_digest(signed[:TAG_BYTES], _tag(content, secret, purpose)):
        raise Forged
    return content


def _tag(text: bytes, secret: str, purpose: str) -> bytes:
    return hmac.digest(secret.encode(), purpose.encode() + b"\0" + text, hashlib.sha256)


def _plain(thing: Any) -> Any:
    """Converts to JSON types: numbers, strings, None and lists stay, everything else becomes {kind:
    content}."""
    if thing is None or isinstance(thing, (bool, int, float)) or type(thing) is str:
        return thing
    if isinstance(thing, np.generic):
        return thing.item()
    if type(thing) is list:
        return [_plain(inner) for inner in thing]
    kind, content = _kind_and_content(thing)
    return {kind: content}


def _kind_and_content(thing: Any) -> tuple[str, Any]:
    """Splits an object into its kind, a key of _MAKERS, and its content."""
    cls = type(thing)
    if cls is tuple:
        return "tuple", _plain(list(thing))
    if cls is dict:
        return "dict", [[_plain(key), _plain(value)] for key, value in thing.items()]
    if isinstance(thing, Path):
        return "path", str(thing)
    if cls is np.ndarray and not thing.dtype.hasobject:
        return "array", [
            thing.dtype.str,
            list(thing.shape),
            base64.b64encode(thing.tobytes()).decode(),
        ]
    if _is_value_class(cls):
        return "class", [cls.__module__, cls.__qualname__, _plain(_arguments(thing))]
    raise TypeError(f"ranks do not exchange {cls.__module__}.{cls.__qualname__}: {thing!r:.200}")


def _object(plain: Any) -> Any:
    """Inverts _plain(). Input that _plain() cannot produce raises many kinds of errors."""
    if isinstance(plain, list):
        return [_object(inner) for inner in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    return _MAKERS[kind](content)


def _array(content: Any) -> np.ndarray:
    dtype, shape, encoded = content
    return np.frombuffer(base64.b64decode(encoded), np.dtype(dtype)).reshape(shape).copy()


def _of_class(content: Any) -> Any:
    module, name, arguments = content
    found: Any = sys.modules[module]  # not imported, because that would run code
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and found.__module__ == module and _is_value_class(found)):
        raise TypeError(name)
    return found(*_object(arguments))


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(_object(content)),
    "dict": lambda content: {_object(key): _object(value) for key, value in content},
    "path": Path,
    "array": _array,
    "class": _of_class,
}


def _is_value_class(kind: type) -> bool:
    """Whether it is a class of hvdtrain that only holds values."""
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return kind.__module__.partition(".")[0] == _OWN and (
        named_tuple or dataclasses.is_dataclass(kind) or issubclass(kind, UserError)
    )


def _arguments(thing: Any) -> list[Any]:
    """Returns the arguments with which its class creates an equal object."""
    if isinstance(thing, tuple):
        return list(thing)
    if isinstance(thing, UserError):
        return list(thing.args)
    return [getattr(thing, field.name) for field in dataclasses.fields(thing) if field.init]


class SignedStore:
    """One connection to a store of torch.distributed. A value that no rank of the job has signed
    counts as absent.

    Its methods raise RuntimeError if the connection is broken or a wait takes too long.
    """

    def __init__(self, store: Any, secret: str) -> None:
        self._store = store
        self._secret = secret

    def set(self, key: str, value: Any) -> None:
        """Sets a value; returns before the store has it."""
        self._store.set(key, pack(value, self._secret, key))

    def set_first(self, key: str, value: Any) -> Any:
        """Sets the value if the key has none; returns the store's value like get()."""
        return self._read(key, self._store.compare_set(key, "", pack(value, self._secret, key)))

    def get(self, key: str) -> Any:
        """Returns the value, which must exist; None if it was not set under this key by a process
        with the job's secret."""
        return self._read(key, self._store.get(key))

    def _read(self, key: str, packed: bytes) -> Any:
        with contextlib.suppress(Forged):
            return unpack(packed, self._secret, key)
        return None

    def has(self, *keys: str) -> bool:
        """Whether each key has a value, signed or not."""
        return bool(self._store.check(list(keys)))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self._store.wait(list(keys), timeout)

    def add(self, counter: str, amount: int) -> int:
        return int(self._store.add(counter, amount))

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)
