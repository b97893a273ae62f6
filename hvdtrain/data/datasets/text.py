"""Text as windows of tokens. A token is a byte of a UTF-8 file, or comes from a tokenizer of the
tokenizers package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.core.folder import check_regular
from hvdtrain.data.field import Field
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.option_error import NoValidationSet, OptionError, expanded
from hvdtrain.data.source import Source, Split, check_indices
from hvdtrain.data.tokenizer import Tokenizer, read_tokenizer
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

MOST_BYTES = 2**31  # limit for a text, whose tokens are kept in memory
_BYTES = 256
_NAMES: dict[Split, str] = {"train": "train.txt", "val": "val.txt"}


STAGING = Staging(is_read_once=True)


def build(
    name: str, root: Path | None, split: Split, *, context: int = 256, tokenizer: Path | None = None
) -> Source:
    """A file of text, or a folder with train.txt and val.txt, for task.name=language: windows of
    context + 1 tokens.

    A window begins with the last token of the previous window, so that each token except the first
    is predicted once. A shorter rest is dropped. For a single file, data.val_share=0.1 takes a
    tenth of its windows for validation.

    context: number of tokens from which the next one is predicted
    tokenizer: a tokenizer.json of the tokenizers package (none: each byte is a token)

    Raises UserError without a root, if the text is not UTF-8 or shorter than a window, and if a
    file is damaged.
    """
    if root is None:
        raise OptionError(
            "data.name=text needs data.root",
            "root",
            "data.root=FILE, or a folder with train.txt and val.txt",
        )
    if not 1 <= context <= 2**20:
        raise OptionError(f"a context of {context} tokens is impossible", "context", "1 to 1048576")
    path = expanded(root, "root")
    if path.is_dir():
        path = path / _NAMES[split]
    elif split == "val":
        what = f"{path.name} is one file, without a validation set"
        raise NoValidationSet(
            what, str(path), "data.val_share=0.1, or a folder with train.txt and val.txt"
        )
    text = _read(path)
    notes: list[str] = []
    of_file = read_tokenizer(expanded(tokenizer, "tokenizer"), notes) if tokenizer else None
    tokens, vocabulary = encode(text, path, of_file)
    if len(tokens) <= context:
        what = (
            f"{len(tokens)} tokens are too few: data.context={context} needs at least one more "
            "than that"
        )
        raise UserError(
            what, str(path), f"a longer text, or data.context={max(1, len(tokens) - 1)} or less"
        )
    tokenized = of_file.digest if of_file else ""
    return Windows(tokens, context, vocabulary, tuple(notes), tokenized)


def _read(path: Path) -> bytes:
    try:
        size = check_regular(path).st_size
        if size > MOST_BYTES:
            raise UserError(
                f"found {size} bytes, expected at most {MOST_BYTES}",
                str(path),
                "a part of the text",
            )
        return np.fromfile(path, np.uint8, count=size).tobytes()
    except OSError as error:
        raise UserError(
            f"the file cannot be read: {error.strerror or error}", str(path), "data.root=FILE"
        ) from None


@dataclass(frozen=True, eq=False)
class Windows(Source):
    """A source of {"tokens": int64 (n, context + 1)}: window i begins with token i x context."""

    tokens: np.ndarray  # uint8, uint16 or uint32 (m,)
    context: int
    vocabulary: int
    notes: tuple[str, ...] = ()  # lines for the header
    tokenizer: str = ""  # its digest; empty if tokens are bytes
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
        """Returns a digest of all tokens."""
        return self.identity()

    def identity(self) -> dict[str, str]:
        text = {"text": digest({"tokens": self.tokens})}
        return {"tokenizer": self.tokenizer, **text} if self.tokenizer else text


def encode(text: bytes, path: Path, tokenizer: Tokenizer | None) -> tuple[np.ndarray, int]:
    """Returns the tokens of a text and the size of the vocabulary. Raises UserError if the text is
    not UTF-8."""
    try:
        characters = text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"byte {error.start} is not UTF-8: {error.reason}",
            f"{path}:{line}",
            "convert the text: iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW (with its actual "
            "encoding)",
        ) from None
    if tokenizer is None:
        return np.frombuffer(text, np.uint8), _BYTES
    return np.array(
        tokenizer.encode(characters), np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32
    ), tokenizer.vocabulary


def decode(tokens: np.ndarray, tokenizer: Tokenizer | None) -> str:
    """Returns the text of integer tokens (m,); bytes that are not UTF-8 are shown escaped."""
    if tokenizer is None:
        return bytes(tokens.astype(np.uint8)).decode(errors="backslashreplace")
    return tokenizer.decode(tokens.tolist())
