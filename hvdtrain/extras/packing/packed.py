"""Several variable-length sequences in one row of tokens: data.pack."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hvdtrain.data.around_source import AroundSource
from hvdtrain.data.field import Channels, Field
from hvdtrain.data.packed import ANSWERS, SEGMENTS, TOKENS, answer_fields, segment_fields
from hvdtrain.data.ragged import LEAST, Ragged, mask_of
from hvdtrain.data.source import Foresight, Source, check_indices
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from hvdtrain.core.arrays import Batch

# rows that are searched for room; the limit lets millions of sequences be packed in seconds
_OPEN = 64


def first_fit(lengths: np.ndarray, length: int) -> Ragged:
    """Returns the sequences of each row, int64. A row has at most `length` tokens.

    In order, each sequence is put into the first of the 64 newest rows with room for it, else into
    a new row. This is first-fit (Johnson et al. 1974), except that only 64 rows are searched.
    Sequences of less than two tokens are dropped, since nothing in them is predicted.
    """
    rows: list[list[int]] = []
    open_rows: list[list[int]] = []
    room: list[int] = []  # free tokens of each open row
    for sequence, size in enumerate(lengths.tolist()):
        if size < LEAST:
            continue
        at = next((number for number, tokens in enumerate(room) if tokens >= size), len(room))
        if at == len(room):
            rows.append([])
            open_rows, room = [*open_rows[-_OPEN + 1 :], rows[-1]], [*room[-_OPEN + 1 :], length]
            at = len(room) - 1
        open_rows[at].append(sequence)
        room[at] -= size
        if room[at] < LEAST:
            del open_rows[at], room[at]
    edges = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return Ragged(np.array([sequence for row in rows for sequence in row], np.int64), edges)


@dataclass(frozen=True, eq=False)
class PackedRows(AroundSource):
    """A source whose samples are rows of `length` tokens: concatenated sequences of another source.

    segments, int64 (length,): 1, 2, ... for the tokens of the first sequence of a row, the second,
    ...; 0 for the padding after them.
    """

    source: Source  # its field `tokens` has sequences of different lengths
    rows: Ragged  # the sequences of each row
    lengths: np.ndarray  # int64, the length of every sequence
    length: int
    note: str = ""

    @property
    def fields(self) -> Mapping[str, Field]:
        tokens = self.source.fields[TOKENS]
        tokens = tokens._replace(shape=(self.length, *tokens.shape[1:]), padding=None, ignored=None)
        answers = answer_fields(tokens) if ANSWERS in self.source.fields else {}
        return {**segment_fields(tokens), **answers}

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: np.ndarray) -> Batch:
        """Reads rows. Raises UserError if the length of a sequence has changed since the start of
        the job."""
        sequences, row, segment = self._members(indices)
        return self._packed(self.source.read(sequences), len(indices), sequences, row, segment)

    def read_in_epochs(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> Batch:
        sequences, row, segment = self._members(indices)
        return self._packed(
            self.source.read_in_epochs(sequences, epochs[row], seed),
            len(indices),
            sequences,
            row,
            segment,
        )

    def _members(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the sequences of these rows, int64 (m,), the row of each, and its number in that
        row, from 1."""
        check_indices(indices, len(self))
        counts = self.rows.lengths[indices]
        mask = mask_of(counts, int(counts.max(initial=0)))
        row, at = np.nonzero(mask)
        return self.rows.padded(indices, mask.shape[1], -1)[mask], row, at + 1

    def _packed(
        self,
        batch: Batch,
        samples: int,
        sequences: np.ndarray,
        row: np.ndarray,
        segment: np.ndarray,
    ) -> Batch:
        tokens = batch[TOKENS]
        mask = batch[self._mask]
        lengths = self.lengths[sequences]
        if len(wrong := np.flatnonzero(mask.sum(1) != lengths)):
            what = (
                f"sequence {sequences[wrong[0]]} has {mask[wrong[0]].sum()} tokens now, and had "
                f"{lengths[wrong[0]]} when it was packed"
            )
            raise UserError(
                what,
                "data.pack",
                "sequences that keep their lengths; or data.pad={tokens: 0} instead of data.pack",
            )
        real = mask_of(np.bincount(row, lengths, samples).astype(np.int64), self.length)
        filled = {
            TOKENS: np.zeros(real.shape, tokens.dtype),
            SEGMENTS: np.zeros(real.shape, np.int64),
        }
        filled[TOKENS][real], filled[SEGMENTS][real] = tokens[mask], np.repeat(segment, lengths)
        if ANSWERS in batch:
            filled[ANSWERS] = np.zeros(real.shape, bool)
            filled[ANSWERS][real] = batch[ANSWERS][mask]
        return filled

    @property
    def _mask(self) -> str:
        padding = self.source.fields[TOKENS].padding
        assert padding is not None
        return padding.mask

    def digests(self, seed: int) -> dict[str, str]:
        return {**self.source.digests(seed), "rows": f"{self.length} tokens"}

    def identity(self) -> dict[str, str]:
        return {**self.source.identity(), "rows": f"{self.length} tokens"}

    def known_stats(
        self, name: str, indices: np.ndarray | None = None, channels: Channels = "last"
    ) -> np.ndarray | None:
        return None

    def known_lengths(self, name: str) -> np.ndarray | None:
        """Returns the number of real tokens in each row."""
        ends = np.concatenate([[0], np.cumsum(self.lengths[self.rows.values])])
        return np.diff(ends[self.rows.edges]) if name == TOKENS else None

    @property
    def foresight(self) -> Foresight | None:
        return None

    @property
    def notes(self) -> tuple[str, ...]:
        return (*self.source.notes, *([self.note] if self.note else []))


def packed(source: Source, length: int, name: str, where: str) -> PackedRows:
    """Packs the sequences of a source into rows of `length` tokens; name: of the set, for the
    header.

    Raises UserError if a sequence is longer, if none has two tokens, or if their lengths are not
    known.
    """
    if SEGMENTS in source.fields:
        what = f"the data have a field {SEGMENTS}, but data.pack creates a field of that name"
        raise UserError(
            what,
            where,
            "remove it from the data; or leave data.pack out if they are already packed",
        )
    lengths = _lengths(source, length, where, "data.pack={longest}, or cut the longer ones")
    rows = first_fit(lengths, length)
    if not len(rows):
        raise UserError(
            f"no {name} sequence has two tokens, so there is nothing to predict",
            where,
            "sequences of two tokens or more",
        )
    used = lengths[rows.values]
    share = used.sum() / (len(rows) * length)
    note = (
        f"{name}: {len(used):,} sequences in {len(rows):,} rows of {length:,} tokens, {share:.1%} "
        "real tokens"
    )
    if len(used) < len(lengths):
        note += f"; left out, as nothing is predicted in one token: {len(lengths) - len(used):,}"
    return PackedRows(source, rows, lengths, length, note)


def each_alone(source: Source, length: int, where: str) -> PackedRows:
    """Returns the source with one sequence in each row, as a trained model is evaluated. Raises
    UserError if a sequence is longer."""
    lengths = _lengths(source, length, where, f"sequences of at most {length} tokens")
    return PackedRows(
        source, Ragged(np.arange(len(source)), np.arange(len(source) + 1)), lengths, length
    )


def _lengths(source: Source, length: int, where: str, fix: str) -> np.ndarray:
    lengths = source.known_lengths(TOKENS)
    if lengths is None:
        what = "the lengths of the sequences are known only when they are read"
        raise UserError(
            what,
            where,
            "data.pad={tokens: 0} instead of data.pack; or known_lengths('tokens') of the source",
        )
    if len(longer := np.flatnonzero(lengths > length)):
        what = f"sequence {longer[0]} has {lengths[longer[0]]:,} tokens, and a row has {length:,}"
        raise UserError(what, where, fix.format(longest=lengths.max()))
    return lengths
