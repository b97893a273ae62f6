"""The user's stream: how it is begun again, and how it is moved to a sample."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from hvdtrain.core.own_line import own_line
from hvdtrain.data.user_data.samples import defined_at
from hvdtrain.errors import UserError, first_line

STATE_METHODS = ("state_dict", "load_state_dict")


class Opened(NamedTuple):
    """The stream from some sample on."""

    samples: Iterator[Any]
    holder: Any  # has the state of the position; None if there is none


class Origin:
    """A stream of the user's, which can be read from its beginning again and again.

    A pass is one reading of the whole stream; passes are numbered from 0. again: calls the user's
    function once more, if it gave a generator.
    """

    def __init__(self, stream: Any, name: str, where: str, again: Callable[[], Any]) -> None:
        self.stream = stream
        self.name = name
        self._where = where
        self._again = again
        self._is_first = True  # the generator has not been used yet
        first = self.opened(0)
        # the state before the first sample, for streams that stay where a state was loaded
        self._start = None if first.holder is None else first.holder.state_dict()

    @property
    def where(self) -> str:
        """The file and line of the user's code that gives the samples."""
        if inspect.isgenerator(self.stream):
            code = self.stream.gi_code
            return f"{code.co_filename}:{code.co_firstlineno}, {code.co_qualname}"
        method = getattr(type(self.stream), "__iter__", None)
        return defined_at(self.stream if method is None else method)

    @property
    def can_skip(self) -> bool:
        return callable(getattr(self.stream, "skip", None))

    def begin(self, number: int) -> Opened:
        """Returns the pass from its first sample on."""
        self._reset(number)
        return self.opened(number)

    def opened(self, number: int) -> Opened:
        """Returns an iterator of the pass."""
        with self._errors("the start of the stream"):
            self._set_pass(number)
            return _opened(self._once_more(), self.stream)

    def skipped(self, number: int, samples: int) -> Opened:
        """Returns the pass without its first samples, by the stream's skip()."""
        self._reset(number)
        with self._errors(f"skip({samples})"):
            rest = self.stream.skip(samples)
            if callable(getattr(rest, "set_epoch", None)):  # a new object, as of Hugging Face
                rest.set_epoch(number)
            return _opened(self.stream if rest is None else rest, None)

    def restored(self, number: int, state: Any) -> Opened:
        """Returns the pass from where state_dict() gave this state."""
        with self._errors("load_state_dict()"):
            self._set_pass(number)
            if _is_stateful(self.stream):
                self.stream.load_state_dict(state)
                return _opened(self.stream, self.stream)
            opened = _opened(self._once_more(), self.stream)
            opened.holder.load_state_dict(state)
            return opened

    def _reset(self, number: int) -> None:
        """Moves a stream that stays where a state was loaded back to its first sample."""
        with self._errors("load_state_dict()"):
            self._set_pass(number)
            if self._start is not None and _is_stateful(self.stream):
                self.stream.load_state_dict(self._start)

    def _set_pass(self, number: int) -> None:
        if callable(getattr(self.stream, "set_epoch", None)):
            self.stream.set_epoch(number)

    def _once_more(self) -> Any:
        if not _is_read_once(self.stream):
            return self.stream() if is_function(self.stream) else self.stream
        if self._is_first:
            self._is_first = False
            return self.stream
        another = self._again()
        if another is self.stream:
            what = f"{self.name} is a {type(another).__name__}, which can be read only once"
            fix = "give the generator function itself, without calling it"
            raise UserError(what, self._where, fix)
        self.stream = another
        return another

    def _errors(self, call: str) -> UserErrors:
        return UserErrors(f"{call} of {self.name}", self._where)


class UserErrors:
    """Turns an exception of the user's code into a UserError that names the call."""

    def __init__(self, call: str, where: str) -> None:
        self._call = call
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, UserError):
            what = f"{self._call}: {type(error).__name__}: {first_line(error)}"
            raise UserError(what, own_line(error) or self._where, "correct it there") from error


def _opened(samples: Any, stream: Any) -> Opened:
    iterator = iter(samples)
    stateful = (one for one in (iterator, stream) if _is_stateful(one))
    return Opened(iterator, next(stateful, None))


def _is_stateful(value: Any) -> bool:
    return all(callable(getattr(value, method, None)) for method in STATE_METHODS)


def is_function(value: Any) -> bool:
    """Whether the value is a function that returns a stream, instead of a stream."""
    return callable(value) and not hasattr(value, "__iter__") and not isinstance(value, type)


def _is_read_once(value: Any) -> bool:
    """Whether the value is a generator or an iterator of Python, such as a map()."""
    return hasattr(value, "__next__") and type(value).__module__ in ("builtins", "itertools")


def not_json(state: Any, path: str = "state_dict()") -> str:
    """Returns the first part of a state that JSON would change, with its type; empty if there is
    none."""
    if isinstance(state, dict):
        found = (
            not_json(value, f"{path}[{key!r:.40}]")
            if type(key) is str
            else f"a key of {path}, {key!r:.40}"
            for key, value in state.items()
        )
        return next(filter(None, found), "")
    if type(state) is list:
        found = (not_json(value, f"{path}[{place}]") for place, value in enumerate(state))
        return next(filter(None, found), "")
    if state is None or type(state) in (bool, int, str):
        return ""
    if type(state) is float and json.dumps(state) not in ("NaN", "Infinity", "-Infinity"):
        return ""
    return f"{path}, a {type(state).__name__}"
