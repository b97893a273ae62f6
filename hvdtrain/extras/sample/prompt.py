"""The tokens that a text begins with, made as the texts of the training were."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvdtrain.config.read import expand
from hvdtrain.config.sections.data import DataConfig
from hvdtrain.data.tokenizer import Tokenizer, read_tokenizer
from hvdtrain.extras.tokenizer_folders.folder import TokenizerFolder, read_folder


class PromptTokens(NamedTuple):
    tokens: np.ndarray  # int64 (m,)
    tokenizer: Tokenizer | None  # None: bytes
    ends: tuple[int, ...]  # tokens that end a text, as the tokenizer says
    where: str  # the tokenizer


def read_prompt(data: DataConfig, text: str) -> PromptTokens:
    """Returns the tokens of a text. Where the run has learned from chats, it is the message of a
    user. Raises UserError for a damaged tokenizer, and for a text that it does not read."""
    path = data.options.get("tokenizer")
    where = f"{path}"
    if path is None:
        return PromptTokens(
            np.frombuffer(text.encode(), np.uint8).astype(np.int64), None, (), where
        )
    if not data.is_of_texts:
        tokenizer = read_tokenizer(expand(path, "data.tokenizer"))
        return PromptTokens(np.array(tokenizer.encode(text), np.int64), tokenizer, (), where)
    folder = read_folder(expand(path, "data.tokenizer"), [])
    tokens = (
        _of_chat(folder, text) if data.options.get("messages") else _of_text(folder, data, text)
    )
    end = folder.number("eos_token")
    ends = () if end is None else (end,)
    return PromptTokens(np.array(tokens, np.int64), folder.tokenizer, ends, where)


def _of_chat(folder: TokenizerFolder, text: str) -> list[int]:
    message = {"role": "user", "content": text}
    asked = folder.chat_template().prompt([message], "--prompt")
    tokens: list[int] = folder.tokenizer.encoding(asked).ids
    return tokens


def _of_text(folder: TokenizerFolder, data: DataConfig, text: str) -> list[int]:
    """Returns the tokens with the special tokens before a text, without those after it."""
    encoding = folder.tokenizer.encoding(text)
    if data.options.get("special_tokens") is False:
        plain: list[int] = encoding.ids
        return plain
    whole = folder.tokenizer.with_special_tokens(encoding)
    of_text = np.flatnonzero(np.array(whole.special_tokens_mask) == 0)
    found: list[int] = whole.ids[: of_text[-1] + 1] if len(of_text) else []
    return found
