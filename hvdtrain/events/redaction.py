"""What a page, a tracker or a message must not show: passwords, tokens, keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
# user:password of an address, up to its last @: a password may hold / and @. Without : or @ before the first / there is no login.
_LOGIN = re.compile(r"//(?=[^\s/?#]*[:@])\S*@")
_SIGNED = re.compile(r"([?&][^=&\s]*(?:token|sig|key|credential|secret|pass|pwd|auth)[^=&\s]*=)[^&\s]+", re.IGNORECASE)  # of its query
_NEXT_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|[^A-Za-z0-9]+")  # hubToken, HUBToken, hub_token
_ANYWHERE = re.compile("pass_?(word|wd|phrase|code)|secret|credential|(api|access|account|private)_?key")  # in a key of small letters
_WORDS = {"auth", "oauth", "authorization", "bearer", "jwt", "pwd"}
_LAST = re.compile(r"(.*token|pass|key)\d*")  # its last word: not max_tokens, pass_through


def without_login(text: str) -> str:
    """The text, with the user, password and signature of each address in it hidden."""
    return _SIGNED.sub(rf"\1{HIDDEN}", _LOGIN.sub(f"//{HIDDEN}@", text))


def shown(value: Any) -> Any:
    """A value of a configuration, without what looks like a secret by its key or in an address. Keys may be nested or dotted."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if inner and is_secret(str(key)) else shown(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shown(inner) for inner in value]
    return without_login(value) if isinstance(value, str) else value


def is_secret(key: str) -> bool:
    """Whether any part of a dotted key names what must not be shown: model.hubToken, data.private_key, data.auth.user."""
    return any(map(_names_a_secret, key.split(".")))


def _names_a_secret(part: str) -> bool:
    words = [word.lower() for word in _NEXT_WORD.split(part) if word and not word.isdigit()]
    return bool(words) and bool(_WORDS.intersection(words) or _ANYWHERE.search("_".join(words)) or _LAST.fullmatch(words[-1]))
