"""The tokens of a record: of its text, with the special tokens that its tokenizer adds, or of its
chat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hvdtrain.data.option_error import OptionError, expanded
from hvdtrain.data.tokenizer import Tokenizer
from hvdtrain.errors import UserError
from hvdtrain.extras.texts.options import TextOptions
from hvdtrain.extras.texts.record import messages_of, record_of, text_of
from hvdtrain.extras.tokenizer_folders.chat_template import ChatTemplate
from hvdtrain.extras.tokenizer_folders.folder import TokenizerFolder, read_folder

_BYTES = 256


class Document(NamedTuple):
    """The tokens of a record that are read."""

    tokens: np.ndarray  # int32 (length,)
    answers: np.ndarray  # bool (length,): which of them belong to an answer of the assistant
    whole: int  # number of tokens before the document was cut


@dataclass(frozen=True, eq=False)
class DocumentReader:
    """Makes tokens of JSON lines. Safe to call from several threads."""

    options: TextOptions
    tokenizer: Tokenizer | None  # None: bytes
    template: ChatTemplate | None  # None: the record has a text
    most: int | None  # tokens of a document
    end: int | None  # the token that ends a document
    padding: int
    finds_answers: bool = False

    @property
    def vocabulary(self) -> int:
        return _BYTES if self.tokenizer is None else self.tokenizer.vocabulary

    def finding_answers(self) -> DocumentReader:
        """Returns the reader of chats with the answers in them. Raises UserError of texts."""
        return replace(self, finds_answers=True)

    def document(self, line: bytes, where: str) -> Document:
        """Raises UserError for a damaged line, and if it cannot be made tokens of."""
        record = record_of(line, where)
        try:
            if self.template is not None:
                return self._of_chat(record, where)
            assert self.options.text is not None
            return self._of_text(text_of(record, self.options.text, where))
        except UserError as error:
            if self.tokenizer is None or error.where != str(self.tokenizer.path):
                raise
            raise UserError(error.what, f"{where}, {error.where}", error.fix) from None

    def _of_text(self, text: str) -> Document:
        if self.tokenizer is None:
            return self._cut(np.frombuffer(text.encode(), np.uint8))
        encoding = self.tokenizer.encoding(text)
        if not self.options.special_tokens:
            return self._cut(np.array(encoding.ids, np.int32))
        whole = len(encoding.ids) + self.tokenizer.special_tokens
        tokens = self.tokenizer.with_special_tokens(encoding, self.most).ids
        if self.end is not None and tokens[-1:] != [self.end]:
            whole += 1
            tokens = [*tokens, self.end]
        found = self._cut(np.array(tokens, np.int32))
        return found._replace(whole=whole)

    def _of_chat(self, record: dict[str, object], where: str) -> Document:
        assert self.tokenizer is not None and self.template is not None
        assert self.options.messages is not None
        messages = messages_of(record, self.options.messages, where)
        render = self.template.with_answers if self.finds_answers else self.template.rendered
        text, answers = render(messages, where)
        encoding = self.tokenizer.encoding(text)
        found = self._cut(np.array(encoding.ids, np.int32))
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)  # of characters
        in_answers = np.zeros(len(offsets), bool)
        for begin, end in answers:  # as transformers does: each token with a character of it
            in_answers |= (offsets[:, 0] < end) & (offsets[:, 1] > begin)
        return found._replace(answers=in_answers[: self.most])

    def _cut(self, tokens: np.ndarray) -> Document:
        kept = tokens[: self.most].astype(np.int32)
        return Document(kept, np.zeros(len(kept), bool), len(tokens))


def document_reader(options: TextOptions, notes: list[str]) -> DocumentReader:
    """Returns the reader of these options, with its tokenizer; appends lines for the user to
    notes. Raises UserError for a wrong tokenizer, and for a token that it does not have."""
    if options.tokenizer is None:
        if options.pad_token is not None:
            raise OptionError(
                "data.pad_token needs data.tokenizer: without it, tokens are bytes",
                "pad_token",
                "leave it out",
            )
        return DocumentReader(options, None, None, options.most_tokens, None, 0)
    folder = read_folder(expanded(options.tokenizer, "tokenizer"), notes)
    template = folder.chat_template() if options.messages is not None else None
    is_text = options.target is None and template is None
    end = folder.number("eos_token") if is_text and options.special_tokens else None
    if end is not None:
        notes.append(
            f"each document ends with {folder.special_tokens['eos_token']} "
            "(data.special_tokens=false adds no tokens)"
        )
    most = options.most_tokens
    if most is None and folder.longest is not None:
        most = folder.longest + (options.target is None)
        notes.append(
            f"data.context={folder.longest} by default, the longest text of the tokenizer's folder"
        )
    reader = DocumentReader(options, folder.tokenizer, template, most, end, 0)
    if options.special_tokens and most is not None and most <= folder.tokenizer.special_tokens:
        raise OptionError(
            f"data.context={options.context} leaves no room beside the "
            f"{folder.tokenizer.special_tokens} special tokens of each text",
            "context",
            "a larger one, or data.special_tokens=false",
        )
    return replace(reader, padding=_padding(options, folder))


def _padding(options: TextOptions, folder: TokenizerFolder) -> int:
    """Returns the token that pads: of the option or of the folder, its end of a text, or 0."""
    if options.pad_token is None:
        number = folder.number("pad_token")
        number = folder.number("eos_token") if number is None else number
        return number or 0
    number = folder.tokenizer.number(options.pad_token)
    if number is None:
        raise OptionError(
            f"the tokenizer has no token {options.pad_token}",
            "pad_token",
            f"{', '.join(folder.special_tokens.values()) or 'one of its tokens'}, or leave it out",
        )
    return number
