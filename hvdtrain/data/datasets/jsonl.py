"""JSON lines: an object in each line, with a text or a chat, and a label where it is classified."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np

from hvdtrain.data.files.split_files import FileOnDisk
from hvdtrain.data.files.staging import Staging
from hvdtrain.data.source import Source, Split
from hvdtrain.data.texts.build import build_texts
from hvdtrain.data.texts.lines import LinesOfFile
from hvdtrain.data.texts.options import text_options
from hvdtrain.errors import UserError

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
