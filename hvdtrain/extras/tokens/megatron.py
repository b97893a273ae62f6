"""Megatron's index of a file of tokens: FILE.idx beside FILE.bin lists sequences and documents."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.core.folder import check_regular
from hvdtrain.errors import UserError

SUFFIX = ".idx"
_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
# of the tokens
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
_FLOATS = {6: "float64", 7: "float32"}
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, code, sequences, entries of documents
_FIX = "copy the pair .bin and .idx again, or write it again with Megatron's preprocess_data.py"


@dataclass(frozen=True, eq=False)
class Index:
    """The sequences of a file of tokens, one after the other, and its documents."""

    dtype: str
    edges: np.ndarray  # int64 (sequences + 1,): sequence i has the tokens edges[i] : edges[i + 1]
    documents: np.ndarray  # int64 (documents + 1,): the first sequence of each, then their number

    @property
    def tokens(self) -> int:
        return int(self.edges[-1])

    @property
    def document_edges(self) -> np.ndarray:
        """int64 (documents + 1,): document i has these tokens, edges[i] : edges[i + 1]."""
        edges: np.ndarray = self.edges[self.documents]
        return edges


def index_bytes(dtype: str, lengths: np.ndarray) -> bytes:
    """Returns the content of an index whose documents have one sequence each. lengths: tokens of
    each document, at most 2**31 - 1."""
    code = next(code for code, name in _CODES.items() if name == dtype)
    count = len(lengths)
    sizes = lengths.astype("<i4")
    ends = np.cumsum(lengths, dtype=np.int64)
    pointers = (ends - lengths) * np.dtype(dtype).itemsize
    header = _HEADER.pack(_MAGIC, _VERSION, code, count, count + 1)
    return b"".join(
        (
            header,
            sizes.tobytes(),
            pointers.astype("<i8").tobytes(),
            np.arange(count + 1, dtype="<i8").tobytes(),
        )
    )


def read_index(path: Path, bin_bytes: int) -> Index:
    """Reads an index. bin_bytes: size of the .bin file. Raises UserError if the index is damaged,
    or if the two files do not belong together."""
    try:
        size = check_regular(path).st_size
        with path.open("rb") as file:
            header = file.read(_HEADER.size)
            content = file.read(size - len(header))
    except OSError as error:
        raise UserError(
            f"the index cannot be read: {error.strerror or error}", str(path), _FIX
        ) from None
    dtype, sequences, entries = _header(header, path)
    expected = 12 * sequences + 8 * entries
    if len(content) != expected:
        more = "; modes of multimodal data are not supported" if len(content) > expected else ""
        raise UserError(
            f"the index has {size:,} bytes, but {sequences:,} sequences and {entries:,} entries of "
            f"documents take {expected + _HEADER.size:,}{more}",
            str(path),
            _FIX,
        )
    lengths = np.frombuffer(content, "<i4", sequences).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", sequences, 4 * sequences)
    documents = np.frombuffer(content, "<i8", entries, 12 * sequences).astype(np.int64)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    width = np.dtype(dtype).itemsize
    if len(wrong := np.flatnonzero((lengths < 0) | (pointers != edges[:-1] * width))):
        raise UserError(
            f"sequence {wrong[0]:,} begins at byte {pointers[wrong[0]]:,} with "
            f"{lengths[wrong[0]]:,} tokens, but the sequences before it end at byte "
            f"{edges[wrong[0]] * width:,}",
            str(path),
            _FIX,
        )
    is_ordered = documents[0] == 0 and (np.diff(documents) >= 0).all()
    if not is_ordered or documents[-1] != sequences:
        raise UserError(
            f"the documents do not divide the {sequences:,} sequences: they begin at sequence "
            f"{documents[0]:,} and end at {documents[-1]:,}",
            str(path),
            _FIX,
        )
    if bin_bytes != edges[-1] * width:
        is_short = bin_bytes < edges[-1] * width
        raise UserError(
            f"the file {'is truncated' if is_short else 'does not belong to its index'}: it has "
            f"{bin_bytes:,} bytes, but {path.name} describes {edges[-1]:,} tokens of {dtype}, "
            f"{edges[-1] * width:,} bytes",
            str(path.with_suffix(".bin")),
            _FIX,
        )
    return Index(dtype, edges, documents)


def _header(header: bytes, path: Path) -> tuple[str, int, int]:
    """Returns the dtype of the tokens, the number of sequences, and the entries of the documents:
    their number plus 1."""
    magic = header[: len(_MAGIC)]
    if magic != _MAGIC:
        raise UserError(
            f"the file is not an index of Megatron: it begins with {magic!r}, not {_MAGIC!r}",
            str(path),
            "write it with Megatron's preprocess_data.py (--dataset-impl mmap), or remove it: "
            "then the .bin file is one stream of tokens",
        )
    if len(header) < _HEADER.size:
        raise UserError(f"the index is truncated: {len(header)} bytes", str(path), _FIX)
    _, version, code, sequences, entries = _HEADER.unpack(header)
    if version != _VERSION:
        raise UserError(
            f"the index has version {version}, expected {_VERSION}",
            str(path),
            "write it with Megatron's preprocess_data.py",
        )
    if code not in _CODES:
        what = f"tokens of type {_FLOATS.get(code, f'number {code}')}"
        raise UserError(f"the index describes {what}, expected integers", str(path), _FIX)
    if entries < 1:
        raise UserError("the index has no documents", str(path), _FIX)
    return _CODES[code], sequences, entries
