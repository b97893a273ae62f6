"""JSON lines: an object in each line, with a text or a chat, and a label where it is classified."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.data.files.selection import Staging
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError
from hvdtrain.extras.split_files.files import FileOnDisk
from hvdtrain.extras.texts.build import build_texts, lines_of_rows
from hvdtrain.extras.texts.lines import LinesOfFile
from hvdtrain.extras.texts.options import text_options

STAGING = Staging(is_of_user=True, may_be_a_file=True)
_TEXT = "text"  # the field, unless an option names one


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    text: str | None = None,
    messages: str | None = None,
    target: str | None = None,
    tokenizer: Path | None = None,
    context: int | None = None,
    special_tokens: bool = True,
    pad_token: str | None = None,
) -> Source:
    """A file of JSON lines, or a folder with train.jsonl and val.jsonl: documents for
    task.name=language, or with data.target texts with labels. Each micro-batch is padded to its
    longest document.

    text: field with the text of a document (default: text)
    messages: field with a chat, a list of {role, content}; the chat template of data.tokenizer
        makes it a text
    target: field y: names or numbers of classes for task.name=classification, numbers for
        regression (none: a language model predicts the tokens)
    tokenizer: a tokenizer.json of the tokenizers package, or a folder that a tokenizer of
        transformers was saved in (none: each byte is a token)
    context: most tokens of a document that a model reads; longer ones are cut (default: the
        model_max_length of the tokenizer's folder, or no limit)
    special_tokens: add the special tokens that the tokenizer adds to a text, and without
        data.target its eos_token at the end of each document
    pad_token: token for padding (default: pad_token of the tokenizer's folder, else its eos_token)

    Raises UserError for a line that is not an object with these fields, with its number.
    """
    text = _TEXT if text is None and messages is None else text
    options = text_options(
        name, text, messages, target, tokenizer, context, special_tokens, pad_token
    )
    return build_texts(name, root, split, (".jsonl", ".ndjson"), lines_of, options)


def build_of_table(
    name: str,
    root: Path | None,
    split: Split,
    suffixes: tuple[str, ...],
    rows_of: Callable[[Path, Sequence[str]], Iterable[tuple[int, Mapping[str, object]]]],
    texts: Mapping[str, Any],
    numbers: Mapping[str, object],
    *,
    word: str = "",
    cells: bool = False,
) -> Source:
    """Returns the texts or chats in columns of a table.

    rows_of: reads these columns of a file, each row with its number. texts: the options of texts.
    numbers: the options of columns of numbers. word: "row" of files without lines. cells: targets
    are texts, as in build_texts(). Raises UserError for wrong options, and as build_texts().
    """
    options = text_options(name, **texts)
    options.check_table(numbers)

    def opened(path: Path) -> LinesOfFile:
        return lines_of_rows(path, rows_of(path, options.fields), word)

    return build_texts(name, root, split, suffixes, opened, options, cells=cells)


def lines_of(path: Path) -> LinesOfFile:
    """Reads a file once, for the offsets of its lines; empty lines are skipped. Raises UserError if
    it cannot be read."""
    file = FileOnDisk.at(path)
    begins = array("q")
    ends = array("q")
    numbers = array("q")
    offset = 0
    try:
        with open(path, "rb") as content:
            for number, line in enumerate(content, 1):
                if line.strip():
                    begins.append(offset)
                    ends.append(offset + len(line.rstrip(b"\r\n")))
                    numbers.append(number)
                offset += len(line)
    except OSError as error:
        raise UserError(
            f"the file cannot be read: {error.strerror or error}", str(path), "data.root=FILE"
        ) from None
    starts, stops, of_file = (np.array(one, np.int64) for one in (begins, ends, numbers))
    return LinesOfFile(path, file, starts, stops, of_file)
