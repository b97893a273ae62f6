"""Hides passwords, tokens and keys in what reports, trackers and messages show."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# user:password of a URL, up to its last @: a password may contain / and @. Without : or @ before
# the first / there is no login.
_LOGIN = re.compile(r"//(?=[^\s/?#]*[:@])\S*@")
# parameters of a URL's query: ?X-Amz-Signature=...
_SIGNATURE = re.compile(
    r"([?&][^=&\s]*(?:token|sig|key|credential|secret|pass|pwd|auth)[^=&\s]*=)[^&\s]+",
    re.IGNORECASE,
)
# hubToken, HUBToken, hub_token
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")
_SECRET_ANYWHERE = re.compile(
    "pass_?(word|wd|phrase|code)|secret|credential|(api|access|account|private)_?key"
)
_SECRET_WORDS = {"auth", "oauth", "authorization", "bearer", "jwt", "pwd"}
# only the last word counts: max_tokens and pass_through are not secrets
_SECRET_LAST_WORD = re.compile(r"(.*token|pass|key)\d*")


def redact_urls(text: str) -> str:
    """Replaces user, password and signature of each URL in a text by ***."""
    return _SIGNATURE.sub(rf"\1{HIDDEN}", _LOGIN.sub(f"//{HIDDEN}@", text))


def redact(value: Any) -> Any:
    """Replaces secrets in a value of a configuration by ***; they are recognized by their keys or
    inside URLs. Keys may be nested or dotted."""
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if inner and is_secret_key(str(key)) else redact(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(inner) for inner in value]
    return redact_urls(value) if isinstance(value, str) else value


def is_secret_key(key: str) -> bool:
    """Whether any part of a dotted key names a secret: model.hubToken, data.private_key,
    data.auth.user."""
    return any(_names_a_secret(part) for part in key.split("."))


def _names_a_secret(part: str) -> bool:
    words = [word.lower() for word in _WORD_BOUNDARY.split(part) if word and not word.isdigit()]
    if not words:
        return False
    return bool(
        _SECRET_WORDS.intersection(words)
        or _SECRET_ANYWHERE.search("_".join(words))
        or _SECRET_LAST_WORD.fullmatch(words[-1])
    )
