"""`${batch.size}` in a value: the value of another key takes its place. Nothing else is looked up, no environment and no file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.config.yaml_reader import MOST_DEPTH, REFERENCE, check_text
from hvdtrain.errors import short


class References:
    """Replaces the references in values; `look_up` gives the value of a key, or raises ValueError."""

    def __init__(self, look_up: Callable[[str], Any]) -> None:
        self._look_up = look_up
        self._replaced: dict[str, Any] = {}  # each key is replaced once: chains of double references would take 2^n steps
        self._open: list[str] = []  # the keys whose references are being replaced, the outermost first

    def replace(self, value: Any) -> Any:
        """The value without references. Raises ValueError where one cannot be replaced, or the text grows too long."""
        if isinstance(value, dict):
            return {key: self.replace(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.replace(inner) for inner in value]
        if not isinstance(value, str):
            return value
        if reference := REFERENCE.fullmatch(value):
            return self._value(reference[1])
        text = check_text(REFERENCE.sub(lambda found: str(self._value(found[1])), value))
        if "${" in text:
            raise ValueError(f"{short(text)} is composed of references")
        return text

    def _value(self, key: str) -> Any:
        if key not in self._replaced:
            if key in self._open:
                raise ValueError(f"${{{key}}} refers to itself")
            if len(self._open) == MOST_DEPTH:
                raise ValueError(f"more than {MOST_DEPTH} references in a chain")
            self._open.append(key)
            self._replaced[key] = self.replace(self._look_up(key))
            self._open.pop()
        if isinstance(self._replaced[key], (dict, list)):
            raise ValueError(f"${{{key}}} is a list or a section: a reference takes a single value")
        return self._replaced[key]
