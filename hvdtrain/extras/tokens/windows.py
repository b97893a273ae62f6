"""Sources of tokens from files: windows of a stream, or documents of different lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.data.field import Field, Padding
from hvdtrain.data.packed import TOKENS
from hvdtrain.data.ragged import LEAST, mask_of, padded_fields, padded_length
from hvdtrain.data.source import LARGE_BYTES, Source, check_indices
from hvdtrain.errors import UserError
from hvdtrain.extras.tokens.token_files import TokenSet

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

_MOST_NAMED = 64  # files whose digests a checkpoint names


class _OfFiles(Source):
    """What both sources know of their files."""

    tokens: TokenSet
    note: str

    @property
    def where(self) -> str:
        files = self.tokens.files
        return str(files[0].path if len(files) == 1 else files[0].path.parent)

    @property
    def reads_from_memory(self) -> bool:
        """Large sets are read ahead by threads: their pages may have to come from a disk."""
        return self.tokens.bytes <= LARGE_BYTES

    @property
    def notes(self) -> tuple[str, ...]:
        return (self.note,)

    def digests(self, seed: int) -> dict[str, str]:
        return self.identity()

    def identity(self) -> dict[str, str]:
        """Returns a digest of each file, or one of all if there are many."""
        return dict(self._identity)

    @cached_property
    def _identity(self) -> dict[str, str]:
        found = {f"file {name}": value for name, value in self.tokens.digests().items()}
        if len(found) > _MOST_NAMED:
            joined = " ".join(f"{name} {value}" for name, value in found.items()).encode()
            found = {"files": digest({"files": np.frombuffer(joined, np.uint8)})}
        manifest = self.tokens.manifest
        if manifest is not None and manifest.tokenizer_digest:
            found["tokenizer"] = manifest.tokenizer_digest
        return found


@dataclass(frozen=True, eq=False)
class TokenWindows(_OfFiles):
    """A source of {"tokens": int64 (n, context + 1)}: window i begins with token i x context of the
    stream, which is the last token of the previous window."""

    tokens: TokenSet
    context: int
    name: str  # of the set, for messages

    def __post_init__(self) -> None:
        if not len(self):
            raise UserError(
                f"{self.tokens.tokens:,} tokens are too few: data.context={self.context} needs at "
                "least one more than that",
                self.where,
                f"more tokens, or data.context={max(1, self.tokens.tokens - 1)} or less",
            )

    @property
    def note(self) -> str:  # type: ignore[override]
        rest = self.tokens.tokens - 1 - len(self) * self.context
        unread = f"; the last {rest:,} are shorter than a window and not read" if rest else ""
        return f"{_files_of(self.name, self.tokens)}, {len(self):,} windows{unread}"

    @property
    def fields(self) -> dict[str, Field]:
        return {TOKENS: Field("int64", (self.context + 1,), self.tokens.vocabulary)}

    def __len__(self) -> int:
        return (self.tokens.tokens - 1) // self.context

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        out = np.empty((len(indices), self.context + 1), np.int64)
        self.tokens.read(indices * self.context, np.full(len(indices), out.shape[1]), out)
        return {TOKENS: out}


@dataclass(frozen=True, eq=False)
class TokenDocuments(_OfFiles):
    """A source of {"tokens", "tokens_mask"}: documents, padded to the longest of a read.

    A document longer than `most` tokens is several samples; each begins with the last token of the
    one before. Documents of one token are left out.
    """

    tokens: TokenSet
    begins: np.ndarray  # int64 (n,), places in the stream
    lengths: np.ndarray  # int64 (n,)
    padding: int
    note: str
    longest: Mapping[str, int] = field(default_factory=dict)  # bounds that cover another set, too

    @cached_property
    def fields(self) -> Mapping[str, Field]:
        rows = max(LEAST, self.longest.get(TOKENS, 0), int(self.lengths.max()))
        kind = Field("int64", (rows,), self.tokens.vocabulary)
        return padded_fields(TOKENS, kind, Padding(self.padding, f"{TOKENS}_mask"))

    def __len__(self) -> int:
        return len(self.begins)

    def read(self, indices: np.ndarray) -> Batch:
        check_indices(indices, len(self))
        lengths = self.lengths[indices]
        rows = padded_length(lengths, self.fields[TOKENS].shape[0])
        found = np.full((len(indices), rows), self.padding, np.int64)
        self.tokens.read(self.begins[indices], lengths, found)
        return {TOKENS: found, f"{TOKENS}_mask": mask_of(lengths, rows)}

    def known_lengths(self, name: str) -> np.ndarray | None:
        return self.lengths if name == TOKENS else None

    def with_bounds(self, longest: Mapping[str, int], values: Mapping[str, int]) -> TokenDocuments:
        return replace(self, longest=dict(longest))


def documents_of(
    tokens: TokenSet, name: str, most: int | None, end: int | None, padding: int
) -> TokenDocuments:
    """Returns the documents of a set. most: tokens of a sample, or None. Raises UserError if no
    document has two tokens."""
    edges = tokens.document_edges(end)
    begins = edges[:-1]
    lengths = np.diff(edges)
    is_read = lengths >= LEAST
    whole = int(np.count_nonzero(is_read))
    begins = begins[is_read]
    lengths = lengths[is_read]
    if most is not None:
        begins, lengths = _in_pieces(begins, lengths, most)
    note = f"{_files_of(name, tokens)}, {whole:,} documents"
    if len(begins) > whole:
        note += f" in {len(begins):,} samples of at most {most:,} tokens"
    if left_out := len(edges) - 1 - whole:
        note += f"; left out, as nothing is predicted in one token: {left_out:,}"
    source = TokenDocuments(tokens, begins, lengths, padding, note)
    if not len(begins):
        raise UserError(
            "no document has two tokens, so there is nothing to predict",
            source.where,
            "documents of two tokens or more",
        )
    return source


def _in_pieces(begins: np.ndarray, lengths: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts documents into pieces of at most `most` tokens, which overlap by one token."""
    counts = -(-(lengths - 1) // (most - 1))
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(len(first)) - first) * (most - 1)
    rest = np.repeat(lengths, counts) - offsets
    return np.repeat(begins, counts) + offsets, np.minimum(rest, most)


def _files_of(name: str, tokens: TokenSet) -> str:
    names = [file.path.name for file in tokens.files]
    shown = names[0] if len(names) == 1 else f"{len(names):,} files"
    kinds = "/".join(sorted({file.tokens.dtype.name for file in tokens.files}))
    return f"{f'{name}: ' if name else ''}{shown}, {tokens.tokens:,} tokens of {kinds}"
