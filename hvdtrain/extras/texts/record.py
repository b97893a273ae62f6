"""One JSON line as a record, and its fields. Every mistake in it raises UserError with the line."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.errors import UserError, nearest, short
from hvdtrain.extras.tokenizer_folders.chat_template import Message

Label = str | int | float
_REMOVE = "correct or remove it"
_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def kind_of_value(value: object) -> str:
    """Names the type of a JSON value."""
    return _KINDS[type(value)]


def record_of(line: bytes, where: str) -> dict[str, Any]:
    """Returns the object of a JSON line."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"byte {error.start} of the line is not UTF-8: {error.reason}",
            where,
            "convert it: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW (with its actual encoding)",
        ) from None
    try:
        found = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
        column = f" at character {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(
            f"the line is not JSON: {reason}{column}",
            where,
            "one JSON object in each line; of a JSON document: jq -c '.[]' FILE > NEW.jsonl",
        ) from None
    if not isinstance(found, dict):
        fix = '{"text": "..."} in each line'
        if isinstance(found, list):
            fix += "; of a JSON document that is a list: jq -c '.[]' FILE > NEW.jsonl"
        raise UserError(f"the line is {kind_of_value(found)}, expected an object", where, fix)
    return found


def text_of(record: Mapping[str, Any], field: str, where: str) -> str:
    """Returns the text of a field."""
    found = _value(record, field, "text", where)
    if isinstance(found, str):
        return checked_text(found, f"field {field}", where)
    fix = _REMOVE
    if isinstance(found, list) and found and isinstance(found[0], dict):
        fix = f"data.messages={field} for a chat, a list of {{role, content}}"
    raise UserError(f"field {field} is {kind_of_value(found)}, expected text", where, fix)


def checked_text(text: str, what: str, where: str) -> str:
    """Returns a text. Raises UserError for half of a UTF-16 pair, which JSON can write."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{what} has \\u{ord(text[error.start]):04x}, which is half of a character",
            where,
            _REMOVE,
        ) from None
    return text


def label_of(record: Mapping[str, Any], field: str, where: str) -> Label:
    """Returns the target of a record."""
    return checked_label(_value(record, field, "target", where), field, where)


def checked_label(found: object, field: str, where: str) -> Label:
    """Returns a target. Raises UserError if it is neither a text nor a number."""
    if isinstance(found, bool):
        return int(found)
    if isinstance(found, str):
        return checked_text(found, f"field {field}", where)
    if isinstance(found, int) and -(2**63) <= found < 2**63:
        return found
    if isinstance(found, float) and math.isfinite(found):
        return found
    raise UserError(
        f"field {field} is {short(repr(found), 40)}, expected the name of a class or a number",
        where,
        _REMOVE,
    )


def messages_of(record: Mapping[str, Any], field: str, where: str) -> list[Message]:
    """Returns the messages of a chat, each with a role. Values that are null are left out, as
    transformers does."""
    found = _value(record, field, "messages", where)
    if not isinstance(found, list) or not found:
        shown = "an empty list" if found == [] else kind_of_value(found)
        raise UserError(
            f"field {field} is {shown}, expected a list of {{role, content}}",
            where,
            "data.text=FIELD if it is plain text" if isinstance(found, str) else _REMOVE,
        )
    return [
        _message(one, f"message {number} of {field}", where) for number, one in enumerate(found)
    ]


def _message(found: object, what: str, where: str) -> Message:
    if not isinstance(found, dict):
        raise UserError(
            f"{what} is {kind_of_value(found)}, expected an object with role and content",
            where,
            _REMOVE,
        )
    if "role" not in found and {"from", "value"} <= found.keys():
        raise UserError(
            f"{what} has from and value, expected role and content",
            where,
            "rename them: human is the role user, gpt is assistant",
        )
    message = {key: value for key, value in found.items() if value is not None}
    for key in ("role", "content"):
        is_optional = key == "content" and "tool_calls" in message
        if key not in message and not is_optional:
            raise UserError(f"{what} has no {key}", where, _REMOVE)
        if not isinstance(message.get(key, ""), str):
            raise UserError(
                f"{key} of {what} is {kind_of_value(message[key])}, expected text", where, _REMOVE
            )
        checked_text(message.get(key, ""), f"{key} of {what}", where)
    return message


def _value(record: Mapping[str, Any], field: str, option: str, where: str) -> Any:
    if field not in record:
        raise UserError(
            f"the record has no field {short(field, 60)}; it has {_listed(list(record))}",
            where,
            f"data.{option}=FIELD; {nearest(field, list(record))}" if record else _REMOVE,
        )
    if record[field] is None:
        raise UserError(f"field {short(field, 60)} is null", where, "fill it, or remove the line")
    return record[field]


def _listed(names: Sequence[str]) -> str:
    return short(", ".join(names), 200) or "none"
