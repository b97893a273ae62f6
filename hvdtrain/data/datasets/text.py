"""Text as windows of tokens: the bytes of a UTF-8 file, or the tokens of a file of the tokenizers package."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hvdtrain.config.read import expand
from hvdtrain.data.source import Source, Split
from hvdtrain.data.text import MOST_BYTES, Windows, encode, read_tokenizer
from hvdtrain.errors import UserError

_NAMES: dict[Split, str] = {"train": "train.txt", "val": "val.txt"}


def build(name: str, root: Path | None, split: Split, *, context: int = 256, tokenizer: Path | None = None) -> Source:
    """A file of text, or a folder with train.txt and val.txt, for task.name=language: windows of context + 1 tokens.

    A window begins with the last token of the one before it, so that each token but the first is predicted once; a rest that is shorter is
    left out. One file has no validation set of its own: data.val_share=0.1 takes a tenth of its windows.

    context: tokens that are read to predict the next
    tokenizer: a tokenizer.json of the tokenizers package (none: each byte is a token)

    Raises UserError without a root, where the text is no UTF-8 or shorter than a window, and where a file is damaged.
    """
    if root is None:
        raise UserError("data.name=text needs data.root", "data.root", "data.root=FILE, or a folder with train.txt and val.txt")
    if not 1 <= context <= 2**20:
        raise UserError(f"a context of {context} tokens is impossible", "data.context", "1 to 1048576")
    path = expand(root, "data.root")
    if path.is_dir():
        path = path / _NAMES[split]
    elif split == "val":
        what = f"{path.name} is one file, without a validation set"
        raise UserError(what, "data.root", "data.val_share=0.1, or a folder with train.txt and val.txt")
    text = _read(path)
    tokens, vocabulary = encode(text, path, read_tokenizer(expand(tokenizer, "data.tokenizer")) if tokenizer else None)
    if len(tokens) <= context:
        what = f"{len(tokens)} tokens are no window of data.context={context} and one more"
        raise UserError(what, str(path), f"a longer text, or data.context={max(1, len(tokens) - 1)} or less")
    return Windows(tokens, context, vocabulary)


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UserError(f"found {size} bytes, expected at most {MOST_BYTES}", str(path), "a part of the text")
        return np.fromfile(path, np.uint8, count=size).tobytes()
    except OSError as error:
        raise UserError(f"the file cannot be read: {error.strerror or error}", str(path), "data.root=FILE") from None
