"""Text as one row of tokens, and windows of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.data.source import Field, check_indices
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

MOST_BYTES = 2**31  # of a text: its tokens are kept in memory
_BYTES = 256


@dataclass(frozen=True, eq=False)
class Windows:
    """A source of {"tokens": int64 (n, context + 1)}: window i begins with token i x context."""

    tokens: np.ndarray  # uint8, uint16 or uint32 (m,)
    context: int
    vocabulary: int
    reads_from_memory = True

    @property
    def fields(self) -> dict[str, Field]:
        return {"tokens": Field("int64", (self.context + 1,), self.vocabulary)}

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        places = indices[:, None] * self.context + np.arange(self.context + 1)
        return {"tokens": self.tokens[places].astype(np.int64)}

    def digests(self, seed: int) -> dict[str, str]:
        """A digest of all tokens."""
        return self.identity()

    def identity(self) -> dict[str, str]:
        return {"text": digest({"tokens": self.tokens})}


def encode(text: bytes, path: Path, tokenizer: Any | None) -> tuple[np.ndarray, int]:
    """The tokens of a text, and how many there may be. Raises UserError where it is no UTF-8."""
    try:
        characters = text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UserError(f"byte {error.start} is no UTF-8: {error.reason}", f"{path}:{line}", "convert the text: iconv -t UTF-8") from None
    if tokenizer is None:
        return np.frombuffer(text, np.uint8), _BYTES
    vocabulary = tokenizer.get_vocab_size()
    numbers = tokenizer.encode(characters, add_special_tokens=False).ids
    return np.array(numbers, np.uint16 if vocabulary <= 2**16 else np.uint32), vocabulary


def decode(tokens: np.ndarray, tokenizer: Any | None) -> str:
    """The text of integer tokens (m,); bytes that are no UTF-8 are shown as such."""
    if tokenizer is None:
        return bytes(tokens.astype(np.uint8)).decode(errors="backslashreplace")
    return str(tokenizer.decode(tokens.tolist()))


def read_tokenizer(path: Path) -> Any:
    """A tokenizer.json. Raises UserError where the package is missing, or the file is absent or damaged."""
    try:
        import tokenizers
    except ImportError:
        raise UserError("data.tokenizer needs the tokenizers package", "data.tokenizer", "pip install 'hvdtrain[tokenizers]'") from None
    if not path.is_file():
        raise UserError("no such file", str(path), "data.tokenizer=FILE, a tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        what = f"the tokenizer is damaged or of another kind: {error!s:.200}"
        raise UserError(what, str(path), "restore the file from a copy") from None
