"""Arrays of HDF5 files, including netCDF-4. Chunks are located once, then read and unpacked without
the library, by several threads."""

from __future__ import annotations

import contextlib
import itertools
import math
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hvdtrain.data.files.selection import Staging
from hvdtrain.data.grid import Grid, GridVariable
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.science.chunks import block_edges, check_chunks
from hvdtrain.extras.science.grids import described, grid_of, text_of
from hvdtrain.extras.science.netcdf_numbers import WORDS, is_packed, unpacked, unpacked_dtype
from hvdtrain.extras.science.stored.build import build_stored
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.selection import SelectionBox
from hvdtrain.extras.science.stored.stored_array import (
    PlainRows,
    StoredArray,
    StoredFile,
    check_axes,
    check_dtype,
    check_shape,
    no_such,
)
from hvdtrain.extras.split_files.files import FileOnDisk, cut_off

# HDF5's filter numbers
_SHUFFLE = 2
_DEFLATE = 1
_MOST_LINKS = 16  # soft links to follow for one name, the same limit as in the library
# approximate bytes to read at a time through the library, if an array has no chunks
_BLOCK_BYTES = 2**20
# errors of h5py
_DAMAGE = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    ArithmeticError,
    TypeError,
)


STAGING = Staging(is_of_user=True, may_be_a_file=True)


def build(
    name: str,
    root: Path | None,
    split: Split,
    *,
    fields: dict[str, str | list[str]] | None = None,
    dtypes: dict[str, str] | None = None,
    split_by: str | None = None,
    split_val: list[bool | int | str] | None = None,
    cache_mb: int = 256,
) -> Source:
    """Returns arrays of train.h5 and val.h5 in data.root, of several such files, or of one file
    with data.val_share or data.split_by.

    fields: array of each field, {x: /u, y: /labels}; "/u[:, 0:3]" is a part, of a list axis 1,
        {split} is train or val (default: x, y)
    dtypes: number types that fields are converted to, {x: float32}
    split_by: an array (n,) that tells validation samples from others: train, val; or the values of
        split_val
    split_val: values of split_by that validate, and ranges of them, "2003:2005"
    cache_mb: most megabytes of decoded chunks that a rank keeps for each set

    Raises UserError without h5py, and if files are damaged, lack a field, or do not contain
    numbers.
    """
    wanted = Wanted(fields, dtypes or {}, split_by, split_val, cache_mb)
    return build_stored(
        name, root, split, (".h5", ".hdf5", ".hdf", ".nc", ".nc4"), Hdf5File.open, wanted
    )


def _h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise OptionError(
            "HDF5 and netCDF files need the package h5py",
            "name",
            "pip install 'hvdtrain[hdf5]'",
        ) from None
    return h5py


@contextlib.contextmanager
def _opened(file: FileOnDisk) -> Iterator[Any]:
    """Opens the file with the library; a script may also have it open. Raises UserError if it is
    not an HDF5 file, or if it has changed."""
    with file.opened() as raw:
        beginning = raw.read(0, min(3, file.size))
    try:
        opened = _h5py().File(file.path, "r")
    except OSError as error:
        if beginning == b"CDF":
            fix = f"nccopy -k nc4 {file.path.name} new.nc"
            raise UserError(
                "the file is of netCDF's classic format, which is not HDF5", str(file.path), fix
            ) from None
        raise cut_off(file.path, f"it is not an HDF5 file ({first_line(error)})") from None
    with opened:
        yield opened


@dataclass(frozen=True)
class Hdf5File(StoredFile):
    file: FileOnDisk

    @staticmethod
    def open(path: Path) -> Hdf5File:
        file = FileOnDisk.at(path)
        with _opened(file):
            return Hdf5File(file)

    @property
    def names(self) -> list[str]:
        return [name for name, has_numbers in self._arrays() if has_numbers]

    @property
    def without_numbers(self) -> Collection[str]:
        return [name for name, has_numbers in self._arrays() if not has_numbers]

    def _arrays(self) -> list[tuple[str, bool]]:
        """Returns the names of the arrays in this file, and whether they hold numbers."""
        arrays: list[tuple[str, bool]] = []

        def visit(name: str, entry: Any) -> None:
            if hasattr(entry, "chunks") and not _is_elsewhere(entry) and entry.shape:
                arrays.append((f"/{name}", entry.dtype.kind in "iufb"))

        with _opened(self.file) as file:
            try:
                file.visititems(visit)
            except _DAMAGE as error:
                raise cut_off(self.file.path, first_line(error)) from None
        return arrays

    @property
    def coordinates(self) -> Collection[str]:
        """Coordinates of dimensions, as netCDF and xarray write them."""
        names = []
        for name in self.names:
            with self._dataset(name) as dataset:
                if text_of(dataset.attrs.get("CLASS")) == "DIMENSION_SCALE":
                    names.append(name)
        return names

    def note(self, name: str) -> str:
        with self._dataset(name) as dataset:
            absent, of = _unwritten(dataset)
            return (
                f"{absent:,} of {of:,} chunks of {name} are not there, and are read as "
                f"{dataset.fillvalue}"
                if absent
                else ""
            )

    def array(self, name: str) -> StoredArray:
        with self._dataset(name) as dataset:
            check_dtype(dataset.dtype, name, self.file.path, _has_texts(dataset))
            return self._array(dataset, name)

    def _array(self, dataset: Any, name: str) -> StoredArray:
        shape = dataset.shape
        dtype = np.dtype(dataset.dtype)
        if dataset.chunks is None:
            check_shape(shape, name, self.file.path)
        else:
            check_chunks(shape, dataset.chunks, dtype.itemsize, name, self.file.path)
        attributes = _attributes(dataset)
        is_whole = shape and not dataset.file.userblock_size and _is_whole(dataset)
        if (
            is_whole
            and not is_packed(attributes)
            and dataset.chunks is None
            and dataset.id.get_offset() is not None
        ):
            return PlainRows(self.file, dataset.id.get_offset(), dtype, shape)
        if (
            is_whole
            and dataset.chunks is not None
            and (filters := _filters(dataset)) is not None
            and hasattr(dataset.id, "chunk_iter")
        ):
            chunks = Chunks(
                self.file,
                name,
                dtype,
                shape,
                dataset.chunks,
                filters,
                dataset.fillvalue,
                *_places(dataset),
            )
            return (
                Unpacked(chunks, attributes, unpacked_dtype(dtype, attributes))
                if is_packed(attributes)
                else chunks
            )
        rows = (
            dataset.chunks[0]
            if dataset.chunks
            else max(1, _BLOCK_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
        )
        return ThroughLibrary(
            self.file,
            name,
            unpacked_dtype(dataset.dtype, attributes),
            shape,
            block_edges(shape[0] if shape else 0, rows),
        )

    @contextlib.contextmanager
    def _dataset(self, name: str) -> Iterator[Any]:
        """Returns an array from the library. Raises UserError if it does not exist, is damaged, or
        has its values in another file."""
        with _opened(self.file) as file:
            try:
                dataset = self._found(file, name)
                if dataset is None:
                    raise no_such(name, self.names, self.file.path)
                if not hasattr(dataset, "chunks"):
                    raise no_such(f"array {name}, which is a group", self.names, self.file.path)
                if _is_elsewhere(dataset):
                    raise self._in_another_file(name)
                if dataset.shape is None:
                    raise UserError(
                        f"{name} is empty: it has neither a shape nor numbers",
                        str(self.file.path),
                        "another array",
                    )
                yield dataset
            except _DAMAGE as error:
                raise cut_off(self.file.path, f"{name}: {first_line(error)}") from None

    def _found(self, file: Any, name: str) -> Any | None:
        """Resolves a path link by link, because the library would open other files, and wait for a
        pipe, just to check that a name exists.

        Returns None if it does not exist. Raises UserError for a link to another file, and for
        circular links.
        """
        h5l = _h5py().h5l
        entry = file
        parts = [part for part in reversed(name.encode().split(b"/")) if part not in (b"", b".")]
        followed = 0
        while parts:
            part = parts.pop()
            links = entry.id.links if hasattr(entry, "keys") else None
            if links is None or not links.exists(part):
                return None
            kind = links.get_info(part).type
            shown = part.decode(errors="replace")
            if kind == h5l.TYPE_HARD:
                entry = entry[part]
            elif kind == h5l.TYPE_SOFT and followed < _MOST_LINKS:
                followed += 1
                target = links.get_val(part)
                entry = file if target.startswith(b"/") else entry
                parts += [one for one in reversed(target.split(b"/")) if one not in (b"", b".")]
            elif kind == h5l.TYPE_SOFT:
                raise UserError(
                    f"the links of {name} form a circle: {shown}",
                    str(self.file.path),
                    "another array",
                )
            else:
                raise self._in_another_file(
                    name,
                    f", {links.get_val(part)[0].decode(errors='replace'):.100} by the link {shown}"
                    if kind == h5l.TYPE_EXTERNAL
                    else "",
                )
        return entry

    def _in_another_file(self, name: str, which: str = "") -> UserError:
        fix = "give that file as data.root, or use h5repack"
        return UserError(
            f"{name} is only a link: its numbers are in another file{which}",
            str(self.file.path),
            fix,
        )

    def grid(self, name: str) -> Grid | None:
        with self._dataset(name) as dataset:
            axes = _axes(dataset)
            shape = tuple(dataset.shape)
            attributes = dict(dataset.attrs)
        return grid_of(name, axes, shape, attributes, self._variable)

    def _variable(self, name: str) -> GridVariable | None:
        """Returns a coordinate with its axes; None if there is no such array of numbers or
        texts."""
        with _opened(self.file) as file:
            found = self._found(file, name)
            if found is None or not hasattr(found, "chunks") or _is_elsewhere(found):
                return None
            is_plain = found.dtype.kind in "iuf" or (len(found.shape) == 1 and _has_texts(found))
            if not is_plain or not 1 <= len(found.shape) <= 2 or _has_no_values(found):
                return None
            axes = tuple(_axes(found))
            attributes = described(dict(found.attrs))
        return GridVariable(PurePosixPath(name).name, axes, self.plane(name), attributes)

    def values(self, name: str) -> np.ndarray:
        return self._values(name, 1)

    def plane(self, name: str) -> np.ndarray:
        return self._values(name, 2)

    def _values(self, name: str, most_axes: int) -> np.ndarray:
        with self._dataset(name) as dataset:
            check_axes(dataset.shape, most_axes, name, self.file.path)
            if dataset.dtype.kind in "SO":
                return np.array([text.strip("\0 ") for text in dataset.asstr()[:]], str)
            attributes = _attributes(dataset)
            return unpacked(
                dataset[:],
                attributes,
                unpacked_dtype(dataset.dtype, attributes),
                f"{name} of {self.file.path}",
            )


def _axes(dataset: Any) -> list[str]:
    """Returns the name of each axis, from the scale that is attached to it; empty without one."""
    if text_of(dataset.attrs.get("CLASS")) == "DIMENSION_SCALE" and len(dataset.shape) == 1:
        return [PurePosixPath(dataset.name).name]
    return [
        PurePosixPath(scales[0].name).name if len(scales) else str(scales.label)
        for scales in dataset.dims
    ]


def _has_texts(dataset: Any) -> bool:
    return _h5py().check_string_dtype(dataset.dtype) is not None


def _has_no_values(dataset: Any) -> bool:
    """Whether it is the dimension of netCDF without a coordinate."""
    return text_of(dataset.attrs.get("NAME")).startswith("This is a netCDF dimension but not")


def _is_elsewhere(dataset: Any) -> bool:
    """Whether a dataset's values are in other files. Must be called before reading its shape, for
    which the library may open them."""
    return bool(dataset.is_virtual or dataset.external)


_NETCDF_FILL = 2.0**119 * 15  # fill value for floats; netcdf.h, NC_FILL_FLOAT
_NETCDF_FILLS: dict[str, float] = {
    "i2": -32767,
    "u2": 65535,
    "i4": -2147483647,
    "u4": 4294967295,
    "i8": 2 - 2**63,
    "u8": 2**64 - 2,
}
_NETCDF_FILLS |= {"f4": _NETCDF_FILL, "f8": _NETCDF_FILL}


def _attributes(dataset: Any) -> dict[str, Any]:
    """Returns the attributes that define the meaning of the values. In netCDF, values that were
    never written are missing, even without an attribute."""
    attributes = {word: dataset.attrs[word] for word in WORDS if word in dataset.attrs}
    fill = _NETCDF_FILLS.get(dataset.dtype.str[1:])
    if fill is not None and dataset.fillvalue == fill:
        attributes.setdefault("_FillValue", dataset.fillvalue)
    return attributes


def _unwritten(dataset: Any) -> tuple[int, int]:
    """Chunks that are not in the file, and how many there should be; an array without chunks counts
    as one."""
    layout = dataset.id.get_create_plist().get_layout()
    if not dataset.size or layout == _h5py().h5d.COMPACT:
        return 0, 0
    if dataset.chunks is None:
        return int(dataset.id.get_storage_size() == 0), 1
    of = math.prod(
        -(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)
    )
    return of - dataset.id.get_num_chunks(), of


def _is_whole(dataset: Any) -> bool:
    """Whether the file has the numbers byte for byte as numpy does: not in fewer bits, as floats of
    another kind, or of a set of names."""
    library = _h5py()
    kind = dataset.id.get_type()
    dtype = np.dtype(dataset.dtype)
    if kind.get_class() == library.h5t.ENUM:
        kind = kind.get_super()
        dtype = np.dtype("int8") if dtype.kind == "b" else dtype
    return bool(kind == library.h5t.py_create(np.dtype(dtype.str)))


def _filters(dataset: Any) -> tuple[int, ...] | None:
    """Returns the filters in the order in which they were applied; None if there are others than
    shuffle and deflate."""
    plist = dataset.id.get_create_plist()
    found = tuple(plist.get_filter(number)[0] for number in range(plist.get_nfilters()))
    return found if set(found) <= {_SHUFFLE, _DEFLATE} else None


def _places(dataset: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the file offset, bytes and mask of skipped filters for each chunk in the grid; 0
    bytes: never written."""
    grid = tuple(
        -(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True)
    )
    offsets = np.zeros(grid, np.int64)
    sizes = np.zeros(grid, np.int64)
    masks = np.zeros(grid, np.int32)

    def note(chunk: Any) -> None:
        place = tuple(
            first // size for first, size in zip(chunk.chunk_offset, dataset.chunks, strict=True)
        )
        offsets[place], sizes[place], masks[place] = (
            chunk.byte_offset,
            chunk.size,
            chunk.filter_mask,
        )

    dataset.id.chunk_iter(note)
    if (offsets + sizes).max(initial=0) > Path(dataset.file.filename).stat().st_size or offsets.min(
        initial=0
    ) < 0:
        raise ValueError("a chunk is outside of the file")
    return offsets, sizes, masks


@dataclass(frozen=True, eq=False)
class Chunks:
    """A chunked array, uncompressed or with deflate, with or without byte shuffle. A block consists
    of the chunks of the same rows."""

    file: FileOnDisk
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    filters: tuple[int, ...]
    fill: Any
    offsets: np.ndarray
    sizes: np.ndarray
    masks: np.ndarray
    edges: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", block_edges(self.shape[0], self.chunks[0]))

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        rows = int(self.edges[block + 1] - self.edges[block])
        block_rows = np.empty((rows, *box.shape), self.dtype)
        grid = [
            range(low // size, -(-high // size))
            for low, high, size in zip(box.first, box.last, self.chunks[1:], strict=True)
        ]
        with self.file.opened() as file:
            for inner in itertools.product(*grid):
                place = (block, *inner)
                count = int(self.sizes[place])
                into, of = self._overlap(inner, box)
                if count:
                    raw = file.read(int(self.offsets[place]), count)
                    block_rows[(slice(None), *into)] = self._unpacked(raw, place)[
                        (slice(0, rows), *of)
                    ]
                else:
                    block_rows[(slice(None), *into)] = self.fill
        return block_rows

    def _overlap(
        self, inner: tuple[int, ...], box: SelectionBox
    ) -> tuple[list[slice], list[slice]]:
        """Returns the position of a chunk in the box, and the part of the chunk in it."""
        into = []
        of = []
        for number, size, low, high in zip(
            inner, self.chunks[1:], box.first, box.last, strict=True
        ):
            first = max(low, number * size)
            last = min(high, (number + 1) * size)
            into.append(slice(first - low, last - low))
            of.append(slice(first - number * size, last - number * size))
        return into, of

    def _unpacked(self, raw: bytes | np.ndarray, place: tuple[int, ...]) -> np.ndarray:
        """Returns all values of a chunk. Raises UserError if their number is wrong."""
        wanted = math.prod(self.chunks) * self.dtype.itemsize
        for number, kind in reversed(list(enumerate(self.filters))):
            if int(self.masks[place]) >> number & 1:
                continue
            raw = (
                _inflated(raw, wanted)
                if kind == _DEFLATE
                else _unshuffled(raw, self.dtype.itemsize)
            )
        if len(raw) != wanted:
            raise cut_off(self.file.path, f"a chunk of {self.name}, {place}, cannot be unpacked")
        return np.frombuffer(raw, self.dtype).reshape(self.chunks)


@dataclass(frozen=True, eq=False)
class Unpacked:
    """Chunks whose values are encoded, as described by attributes."""

    chunks: Chunks
    attributes: Mapping[str, Any]
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.chunks.shape

    @property
    def edges(self) -> np.ndarray:
        return self.chunks.edges

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        where = f"{self.chunks.name} of {self.chunks.file.path}"
        return unpacked(self.chunks.decode(block, box), self.attributes, self.dtype, where)


def _inflated(raw: bytes | np.ndarray, most: int) -> bytes:
    """Returns at most `most` decompressed bytes; empty if they are damaged."""
    unpack = zlib.decompressobj()
    try:
        found = unpack.decompress(raw if isinstance(raw, bytes) else raw.tobytes(), most)
        return found if unpack.eof or not unpack.decompress(unpack.unconsumed_tail, 1) else b""
    except zlib.error:
        return b""


def _unshuffled(raw: bytes | np.ndarray, item: int) -> np.ndarray:
    """Undoes HDF5's shuffle filter, which stores all first bytes, then all second ones: uint8 (n,).
    Faster than a transposition."""
    array = np.frombuffer(raw, np.uint8)
    numbers = len(array) // item
    found = np.empty((numbers, item), np.uint8)
    for byte in range(item):
        found[:, byte] = array[byte * numbers : (byte + 1) * numbers]
    return (
        np.concatenate([found.ravel(), array[numbers * item :]])
        if numbers * item < len(array)
        else found.ravel()
    )


@dataclass(frozen=True, eq=False)
class ThroughLibrary:
    """An array that h5py reads, with one lock for all threads: of other filters, of packed numbers,
    or without a place in the file."""

    file: FileOnDisk
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    edges: np.ndarray

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        with Hdf5File(self.file)._dataset(self.name) as dataset:
            raw = dataset[(slice(int(self.edges[block]), int(self.edges[block + 1])), *box.slices)]
            return unpacked(
                raw, _attributes(dataset), self.dtype, f"{self.name} of {self.file.path}"
            )
