"""What a page, a tracker or a message must not show: passwords, tokens, keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_LOGIN = re.compile(r"//[^/@\s]+@")  # user:password of an address
_SIGNED = re.compile(r"([?&][^=&\s]*(?:token|sig|signature|key|credential|secret|password)[^=&\s]*=)[^&\s]+", re.IGNORECASE)  # of its query
_SECRET = re.compile(r"(^|_)(password|passwd|secret|token|apikey|(api|access|secret)_key|credentials?)$", re.IGNORECASE)


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
    return bool(_SECRET.search(key.rpartition(".")[2]))
