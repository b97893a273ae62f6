"""Opens the files of tokens of one data set: memory-mapped, and checked against what describes
them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import xxhash

from hvdtrain.core.folder import check_regular
from hvdtrain.core.progress import fold
from hvdtrain.data.files.selection import FileState
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import LARGE_BYTES
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.tokens.manifest import Manifest, WrittenShard
from hvdtrain.extras.tokens.megatron import SUFFIX, Index, read_index

SUFFIXES = (".bin", ".npy")
_PLACES = 4096  # of a large set, whose content enters its digest there
_PLACE_TOKENS = 64
_AT_A_TIME = 2**24  # tokens searched for an end at a time
_DRAWN = 0x746F6B656E73  # a stream of counters


@dataclass(frozen=True, eq=False)
class TokenFile:
    """One memory-mapped file of tokens."""

    path: Path
    state: FileState  # when the job opened it
    tokens: np.ndarray  # integers (n,)
    index: Index | None = None

    def check_unchanged(self) -> None:
        """Raises UserError if the file is not as the job opened it. A file that is truncated while
        it is mapped would end the process with a bus error."""
        try:
            now = _state(os.stat(self.path))
        except OSError as error:
            raise UserError(
                f"the file has vanished since the job began: {error.strerror}",
                str(self.path),
                "restore it; the same command resumes the job",
            ) from None
        if now != self.state:
            change = (
                f"its size is {now.size:,} bytes and was {self.state.size:,}"
                if now.size != self.state.size
                else "its time of change is another one"
            )
            raise UserError(
                f"the file has changed since the job began: {change}",
                str(self.path),
                "restore it; the same command resumes the job",
            )


def _state(status: os.stat_result) -> FileState:
    return FileState(status.st_size, status.st_mtime_ns)


def open_file(path: Path, dtype: str | None, written: WrittenShard | None) -> TokenFile:
    """Maps a file of tokens. dtype: of a .bin file without an index; None: what is beside it, or
    uint16. written: its entry in tokens.json.

    Raises UserError if the file is empty, truncated, has another dtype, or cannot be read.
    """
    try:
        state = _state(check_regular(path))
    except OSError as error:
        raise UserError(
            f"the file cannot be read: {error.strerror or error}", str(path), "data.root=FILE"
        ) from None
    if written is not None and state.size != written.bytes:
        is_short = state.size < written.bytes
        raise UserError(
            f"the file {'is truncated' if is_short else 'has changed'}: it has {state.size:,} "
            f"bytes, and `hvdtrain tokenize` wrote {written.bytes:,}",
            str(path),
            "remove it and tokens.json, and run `hvdtrain tokenize` again with the same arguments",
        )
    if not state.size:
        raise UserError("the file is empty", str(path), "remove it, or write it again")
    if path.suffix == ".npy":
        return TokenFile(path, state, _npy(path, dtype))
    beside = path.with_suffix(SUFFIX)
    index = read_index(beside, state.size) if beside.exists() else None
    if index is not None and dtype not in (None, index.dtype):
        raise OptionError(
            f"data.dtype={dtype}, but {beside.name} says that the tokens are {index.dtype}",
            "dtype",
            "leave data.dtype out",
        )
    kind = np.dtype(index.dtype if index else dtype or "uint16").newbyteorder("<")
    if state.size % kind.itemsize:
        raise UserError(
            f"the file is truncated or has another dtype: {state.size:,} bytes are not a whole "
            f"number of {kind.name} tokens",
            str(path),
            "copy it again; or data.dtype=uint16, uint32 or int32, as it was written",
        )
    mapped = np.memmap(path, kind, "r")
    return TokenFile(path, state, mapped.view(np.ndarray), index)


def _npy(path: Path, dtype: str | None) -> np.ndarray:
    try:
        found = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"the file is truncated or not a .npy file: {first_line(error)}",
            str(path),
            "copy it again, or write it again with numpy.save()",
        ) from None
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise UserError(
            f"the array is {found.dtype} {found.shape}, expected integers (n,)",
            str(path),
            "numpy.save(FILE, tokens.reshape(-1).astype('uint16'))",
        )
    if not len(found):
        raise UserError("the file has no tokens", str(path), "remove it, or write it again")
    if dtype not in (None, found.dtype.name):
        raise OptionError(
            f"data.dtype={dtype}, but {path.name} has tokens of {found.dtype.name}",
            "dtype",
            "leave data.dtype out",
        )
    tokens: np.ndarray = found.view(np.ndarray)
    return tokens


@dataclass(frozen=True, eq=False)
class TokenSet:
    """The files of one data set in order, as one stream of tokens."""

    files: tuple[TokenFile, ...]
    vocabulary: int
    manifest: Manifest | None = None

    @cached_property
    def edges(self) -> np.ndarray:
        """int64 (files + 1,): file i has the tokens edges[i] : edges[i + 1] of the stream."""
        return np.cumsum([0, *(len(file.tokens) for file in self.files)], dtype=np.int64)

    @cached_property
    def _signed(self) -> bool:
        """Whether a token may be negative."""
        return any(file.tokens.dtype.kind == "i" for file in self.files)

    @property
    def tokens(self) -> int:
        return int(self.edges[-1])

    @property
    def bytes(self) -> int:
        return sum(file.state.size for file in self.files)

    def read(self, begins: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
        """Copies tokens into the rows of int64 (n, longest): row i gets lengths[i] tokens from
        begins[i] of the stream on.

        Raises UserError for a token that is not in the vocabulary, and for a file that has changed.
        """
        if len(self.files) == 1:
            self.files[0].check_unchanged()
            tokens = self.files[0].tokens
            for row, begin, length in zip(out, begins.tolist(), lengths.tolist(), strict=True):
                row[:length] = tokens[begin : begin + length]
        else:
            self._read_over_files(begins, lengths, out)
        self._check(begins, out)

    def _read_over_files(self, begins: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
        firsts = self._file_of(begins)
        for number in np.unique(np.append(firsts, self._file_of(begins + lengths - 1))).tolist():
            self.files[number].check_unchanged()
        places = begins - self.edges[firsts]
        rows = zip(out, firsts.tolist(), places.tolist(), lengths.tolist(), strict=True)
        for row, number, place, length in rows:
            part = self.files[number].tokens[place : place + length]
            row[: len(part)] = part
            done = len(part)
            following = number
            while done < length:  # it ends in another file
                following += 1
                part = self.files[following].tokens[: length - done]
                row[done : done + len(part)] = part
                done += len(part)

    def _file_of(self, places: np.ndarray) -> np.ndarray:
        """Returns the file of each token of the stream."""
        return np.searchsorted(self.edges, places, "right") - 1

    def _check(self, begins: np.ndarray, out: np.ndarray) -> None:
        if not out.size or (out.max() < self.vocabulary and not (self._signed and out.min() < 0)):
            return
        row, column = np.argwhere((out >= self.vocabulary) | (out < 0))[0].tolist()
        place = int(begins[row]) + column
        number = int(self._file_of(np.array(place)))
        raise UserError(
            f"token {place - self.edges[number]:,} of the file is {out[row, column]}, but the "
            f"vocabulary has tokens 0 to {self.vocabulary - 1}",
            str(self.files[number].path),
            "data.vocabulary=N, the number of tokens of the tokenizer; or data.dtype, if the file "
            "was written with another one",
        )

    def document_edges(self, end: int | None) -> np.ndarray:
        """Returns int64 (documents + 1,), from the indexes, or from the token `end` in files
        without one. Raises UserError if neither is known."""
        edges = [np.zeros(1, np.int64)]
        for file, first in zip(self.files, self.edges.tolist(), strict=False):
            if file.index is not None:
                found = file.index.document_edges
            elif end is None:
                raise OptionError(
                    f"data.documents=true needs to know where the documents of {file.path.name} "
                    "end, and there is no index beside it",
                    "documents",
                    "data.end=N, the token that ends a text: 50256 for GPT-2; or leave "
                    "data.documents out",
                )
            else:
                found = np.concatenate([*_ends(file.tokens, end), [len(file.tokens)]])
            edges.append(first + found)
        return np.unique(np.concatenate(edges))

    def digests(self) -> dict[str, str]:
        """Returns a digest of the content of each file; for large sets, of a sample of it.

        Raises UserError for a file that differs from the digest in tokens.json.
        """
        if self.bytes > LARGE_BYTES:
            return {file.path.name: self._digest_of_places(file) for file in self.files}
        found = {
            file.path.name: xxhash.xxh3_128(file.tokens.data).hexdigest() for file in self.files
        }
        for shard in self.manifest.shards if self.manifest else ():
            if (now := found.get(shard.file, shard.digest)) != shard.digest:
                raise UserError(
                    f"the file has changed since `hvdtrain tokenize` wrote it: its digest is {now} "
                    f"and was {shard.digest}",
                    str(self.files[0].path.parent / shard.file),
                    "restore it from a copy; or remove it and tokens.json, and run `hvdtrain "
                    "tokenize` again with the same arguments",
                )
        return found

    def _digest_of_places(self, file: TokenFile) -> str:
        count = max(1, _PLACES // len(self.files))
        drawn = fold(_DRAWN, np.arange(count, dtype=np.uint64)) % np.uint64(len(file.tokens))
        hashed = xxhash.xxh3_128(str(file.state.size).encode())
        for place in np.unique(drawn).tolist():
            hashed.update(file.tokens[place : place + _PLACE_TOKENS].data)
        return hashed.hexdigest()


def _ends(tokens: np.ndarray, end: int) -> Iterator[np.ndarray]:
    """Yields the places behind each token that ends a document."""
    for start in range(0, len(tokens), _AT_A_TIME):
        part = tokens[start : start + _AT_A_TIME]
        yield np.flatnonzero(part == end) + start + 1
