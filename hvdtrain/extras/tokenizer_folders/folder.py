"""A tokenizer with what tokenizer_config.json of transformers says of it: special tokens, the chat
template, the longest text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.core.folder import check_regular
from hvdtrain.data.tokenizer import Tokenizer, read_tokenizer
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.tokenizer_folders.chat_template import ChatTemplate, compiled

_CONFIG = "tokenizer_config.json"
_SPECIAL = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_TEMPLATE = "chat_template.jinja"
_MOST_BYTES = 2**24  # of each file
_LONGEST = 2**20  # transformers writes 1e30 where it does not know the longest text
_FIX = "restore the file from a copy"


@dataclass(frozen=True)
class TokenizerFolder:
    """A tokenizer, and what its folder says besides."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]  # eos_token -> </s>
    longest: int | None  # tokens of a text
    template: str | None  # the source of the chat template

    def number(self, name: str) -> int | None:
        """Returns the number of a special token, such as eos_token; None if it has none."""
        token = self.special_tokens.get(name)
        return None if token is None else self.tokenizer.number(token)

    def chat_template(self) -> ChatTemplate:
        """Raises UserError if the folder has no chat template, or one that is not a template."""
        where = str(self.tokenizer.path.parent)
        if self.template is None:
            raise UserError(
                "the tokenizer has no chat template",
                where,
                f"the file {_TEMPLATE} there, from the folder of a model that was trained on chats",
            )
        return compiled(self.template, self.special_tokens, where)


def read_folder(path: Path, notes: list[str]) -> TokenizerFolder:
    """Reads a tokenizer.json, or the folder that has it with tokenizer_config.json. Raises
    UserError as read_tokenizer() does, and for a damaged file."""
    tokenizer = read_tokenizer(path, notes)
    folder = tokenizer.path.parent
    config = _config(folder / _CONFIG) if path.is_dir() else {}
    special = {name: _content(config[name]) for name in _SPECIAL if _content(config.get(name))}
    longest = _whole(config.get("model_max_length"))
    template = _template(folder, config) if path.is_dir() else None
    return TokenizerFolder(tokenizer, special, longest, template)


def _whole(value: object) -> int | None:
    """Returns a known length; None for others."""
    is_known = isinstance(value, int | float) and 1 <= value <= _LONGEST
    return int(value) if is_known else None  # type: ignore[call-overload]


def _content(value: object) -> str:
    """Returns the text of a special token, which is a string or an object with `content`."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _config(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        found = {} if text is None else json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the file is not JSON: {first_line(error)}", str(path), _FIX) from None
    if not isinstance(found, dict):
        raise UserError("the file is not a JSON object", str(path), _FIX)
    return found


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template: a file, a string, or the default one of a list."""
    if (text := _text(folder / _TEMPLATE)) is not None:
        return text
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _text(path: Path) -> str | None:
    """Returns the text of a file; None if there is no such file."""
    try:
        if check_regular(path).st_size > _MOST_BYTES:
            raise UserError(f"more than {_MOST_BYTES} bytes", str(path), _FIX)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"the file cannot be read: {first_line(error)}", str(path), _FIX) from None
