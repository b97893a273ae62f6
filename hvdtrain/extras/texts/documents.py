"""Documents: a source of texts or chats as tokens, which are made when a sample is read."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.data.field import Field, Padding
from hvdtrain.data.packed import ANSWERS, TOKENS, answer_fields
from hvdtrain.data.ragged import LEAST, Ragged, mask_of, padded_fields, padded_length
from hvdtrain.data.source import Source, check_indices
from hvdtrain.errors import UserError
from hvdtrain.extras.texts.document_reader import Document, DocumentReader
from hvdtrain.extras.texts.lines import Lines
from hvdtrain.extras.texts.targets import Targets

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

INPUTS = ("input_ids", "attention_mask")  # names in transformers: of a model that classifies
_AT_A_TIME = 256  # lines


@dataclass(frozen=True, eq=False)
class Documents(Source):
    """A source of variable-length documents; a read pads them to its longest one.

    For a language model {"tokens", "tokens_mask"}, with the answers of chats {"answers"}; with
    targets {"input_ids", "attention_mask", "y"}. Only the offsets and lengths of the documents are
    in memory. Documents in which nothing is predicted are left out.
    """

    lines: Lines
    reader: DocumentReader
    targets: Targets | None  # None: for a language model
    where: str  # the files, for messages
    notes_on_reading: tuple[str, ...] = ()
    # int64 (lines, 4): tokens of the document, of those that are read, of answers; a checksum
    measured: np.ndarray | None = None
    # bounds that cover another set, too
    longest: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        return True

    def measure(self, rank: int, size: int) -> np.ndarray:
        """Makes the tokens of this rank's part of the lines once, to check and to count them; see
        `measured`. Raises UserError for the first line that is wrong."""
        lines = np.array_split(np.arange(len(self.lines)), size)[rank]
        rows = []
        for start in range(0, len(lines), _AT_A_TIME):
            for document in self._documents(lines[start : start + _AT_A_TIME]):
                content = document.tokens.tobytes() + np.packbits(document.answers).tobytes()
                rows.append(
                    (
                        document.whole,
                        len(document.tokens),
                        np.count_nonzero(document.answers[1:]),
                        zlib.crc32(content),
                    )
                )
        return np.array(rows, np.int64).reshape(-1, 4)

    def with_measures(self, measured: np.ndarray) -> Documents:
        """Returns the source with the measures of all lines. Raises UserError if no document is
        left."""
        found = replace(self, measured=measured)
        if not len(found):
            raise UserError(
                "no document has two tokens, so there is nothing to predict"
                if len(self.lines)
                else "the file is empty",
                self.where,
                "documents of two tokens or more" if len(self.lines) else "one with records",
            )
        if self.reader.finds_answers and not found._measures[:, 2].any():
            raise UserError(
                "no conversation has an answer of the assistant, so there is nothing to predict",
                self.where,
                "messages with role assistant",
            )
        return found

    def with_answers(self) -> Documents:
        return replace(self, reader=self.reader.finding_answers())

    @cached_property
    def _measures(self) -> np.ndarray:
        return self.measure(0, 1) if self.measured is None else self.measured

    @cached_property
    def _kept(self) -> np.ndarray:
        """The lines of the documents that are samples, int64 (n,)."""
        return np.flatnonzero(self._measures[:, 1] >= (LEAST if self.targets is None else 1))

    @property
    def _lengths(self) -> np.ndarray:
        """int64 (n,)"""
        lengths: np.ndarray = self._measures[self._kept, 1]
        return lengths

    @property
    def _names(self) -> tuple[str, str]:
        """The names of the tokens and of their mask."""
        return (TOKENS, f"{TOKENS}_mask") if self.targets is None else INPUTS

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        name, mask = self._names
        rows = max(LEAST, self.longest.get(name, 0), int(self._lengths.max()))
        kind = Field("int64", (rows,), self.reader.vocabulary)
        fields = padded_fields(name, kind, Padding(self.reader.padding, mask))
        if self.reader.finds_answers:
            fields |= answer_fields(kind)
        if self.targets is not None:
            y = self.targets.y
            fields["y"] = Field(str(y.dtype), (), len(self.targets.class_names))
        return fields

    def __len__(self) -> int:
        return len(self._kept)

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        lines = self._kept[indices]
        documents = list(self._documents(lines))
        lengths = np.array([len(one.tokens) for one in documents], np.int64)
        name, mask = self._names
        rows = padded_length(lengths, self.fields[name].shape[0])
        tokens = [one.tokens for one in documents]
        batch: Batch = {
            name: _padded(tokens, rows, self.reader.padding, "int64"),
            mask: mask_of(lengths, rows),
        }
        if self.reader.finds_answers:
            batch[ANSWERS] = _padded([one.answers for one in documents], rows, 0, "bool")
        if self.targets is not None:
            batch["y"] = self.targets.y[lines]
        return batch

    def _documents(self, lines: np.ndarray) -> Iterator[Document]:
        for line, content in zip(lines.tolist(), self.lines.read(lines), strict=True):
            where = self.lines.where(line)
            document = self.reader.document(content, where)
            if self.targets is not None and not len(document.tokens):
                raise UserError(
                    f"field {self.reader.options.text} has no tokens",
                    where,
                    "fill it, or remove it",
                )
            yield document

    def with_bounds(self, longest: Mapping[str, int], values: Mapping[str, int]) -> Documents:
        """Returns the source with the longest documents of both sets; they have one vocabulary."""
        return replace(self, longest=dict(longest))

    @property
    def takes_class_names(self) -> bool:
        return True

    @property
    def nested_inputs(self) -> tuple[str, ...]:
        return () if self.targets is None else INPUTS

    @property
    def class_names(self) -> tuple[str, ...]:
        return () if self.targets is None else self.targets.class_names

    def known_labels(self) -> np.ndarray | None:
        if self.targets is None or self.targets.y.dtype.kind != "i":
            return None
        y: np.ndarray = self.targets.y[self._kept]
        return y

    def known_lengths(self, name: str) -> np.ndarray | None:
        return self._lengths if name == self._names[0] else None

    def digests(self, seed: int) -> dict[str, str]:
        """Returns a digest of the tokens of all documents."""
        return self.identity()

    def identity(self) -> dict[str, str]:
        y = {} if self.targets is None else {"y": self.targets.y}
        of_all = {"documents": digest({"documents": self._measures, **y})}
        tokenizer = self.reader.tokenizer
        return of_all if tokenizer is None else {"tokenizer": tokenizer.digest, **of_all}

    @property
    def notes(self) -> tuple[str, ...]:
        return (self._counts(), *self.notes_on_reading)

    def _counts(self) -> str:
        """Returns a line with what is read and what is not."""
        whole, tokens, answers, _ = self._measures[self._kept].T
        what = "document" if self.reader.template is None else "conversation"
        lengths = f"{tokens.min():,} to {tokens.max():,}"
        if tokens.min() == tokens.max():
            lengths = f"{tokens.min():,}"
        names = ", ".join(path.name for path in self.lines.paths)
        line = f"{names}: {_some(len(self), what)}, {_some(tokens.sum(), 'token')}, {lengths} each"
        if self.reader.finds_answers:
            line += f"; {answers.sum():,} of them are predicted, in answers"
            if without := int(np.count_nonzero(answers == 0)):
                line += f"; {_some(without, what)} without an answer"
        if cut := int(np.count_nonzero(whole > tokens)):
            line += (
                f"; {cut:,} cut to {_some(self.reader.most or 0, 'token')}, "
                f"{_some((whole - tokens).sum(), 'token')} not read (data.context)"
            )
        if dropped := len(self.lines) - len(self):
            line += f"; left out, as nothing is predicted in one token: {dropped:,}"
        return line


def _some(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' if count != 1 else ''}"


def _padded(rows: list[np.ndarray], length: int, value: int, dtype: str) -> np.ndarray:
    """Returns (n, length)"""
    edges = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    values = np.concatenate([*rows, np.zeros(0, np.int32)]).astype(dtype)
    return Ragged(values, edges).padded(np.arange(len(rows)), length, value)


def paths_of(paths: list[Path]) -> str:
    """Names files for messages: the only one, or their folder."""
    return f"{paths[0] if len(paths) == 1 else paths[0].parent}"
