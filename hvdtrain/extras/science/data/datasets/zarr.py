"""Arrays of Zarr groups in folders and zip files, versions 2 and 3: chunks of the same rows are
read when one of their samples is needed."""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import os
import struct
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hvdtrain.core.folder import WrongKind, check_regular
from hvdtrain.data.files.selection import Staging
from hvdtrain.data.grid import Grid, GridVariable
from hvdtrain.data.option_error import OptionError
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.science.chunks import block_edges, check_chunks
from hvdtrain.extras.science.grids import described, grid_of
from hvdtrain.extras.science.netcdf_numbers import is_packed, unpacked, unpacked_dtype
from hvdtrain.extras.science.stored.build import build_stored
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.selection import SelectionBox
from hvdtrain.extras.science.stored.stored_array import (
    StoredArray,
    StoredFile,
    check_axes,
    check_dtype,
    no_such,
)
from hvdtrain.extras.split_files.files import FileOnDisk, cut_off

_CODEC_KEYS = ("filters", "compressor", "codecs", "index_codecs")
# codecs of numcodecs and zarr, without pickle, which may run code, and msgpack2
_COMPRESSORS = {"blosc", "bz2", "gzip", "lz4", "lzma", "pcodec", "zfpy", "zlib", "zstd"}
_CHECKSUMS = {"adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3"}
_NUMBERS = {
    "astype",
    "bitround",
    "bytes",
    "delta",
    "fixedscaleoffset",
    "packbits",
    "quantize",
    "sharding_indexed",
    "shuffle",
    "transpose",
}
_TEXTS = {"base64", "categorize", "json2", "vlen-array", "vlen-bytes", "vlen-utf8"}
_CODECS = _COMPRESSORS | _CHECKSUMS | _NUMBERS | _TEXTS
_DESCRIPTIONS = (".zarray", "zarr.json")


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
    """Returns arrays of train.zarr and val.zarr (or .zarr.zip) in data.root, of several, or of one
    with data.val_share or data.split_by.

    fields: array of each field, {x: u, y: labels}; "u[:, 0:3]" is a part, of a list axis 1, {split}
        is train or val (default: x, y)
    dtypes: number types that fields are converted to, {x: float32}
    split_by: an array (n,) that tells validation samples from others: train, val; or the values of
        split_val
    split_val: values of split_by that validate, and ranges of them, "2003:2005"
    cache_mb: most megabytes of decoded chunks that a rank keeps for each set

    Raises UserError without zarr, and if groups are damaged, lack a field or a chunk, or do not
    contain numbers.
    """
    wanted = Wanted(fields, dtypes or {}, split_by, split_val, cache_mb)
    return build_stored(name, root, split, (".zarr", ".zarr.zip"), ZarrGroup.open, wanted)


def _zarr() -> Any:
    try:
        import zarr
    except ImportError:
        raise OptionError(
            "Zarr groups need the package zarr", "name", "pip install 'hvdtrain[zarr]'"
        ) from None
    return zarr


@functools.cache
def _folder_store() -> type[Any]:
    """Returns the library's store of a folder, restricted to regular files, because a pipe would
    never end, and without links out of the folder."""
    store: Any = _zarr().storage.LocalStore

    class RegularFiles(store):
        async def get(self, key: str, *rest: Any, **named: Any) -> Any:
            _check_inside(self.root, key)
            return await super().get(key, *rest, **named)

    return RegularFiles


def _check_inside(root: Path, key: str) -> None:
    """Raises OSError for anything but a file in a group, and for a link out of it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path = (root / key).resolve(strict=True)
        if not path.is_relative_to(root.resolve()):
            raise WrongKind(errno.EINVAL, "a link out of the folder of the group", key)
        if not path.is_dir():
            check_regular(path)


def _opened(path: Path) -> Any:
    zarr = _zarr()
    if not path.is_dir():
        FileOnDisk.at(path)  # checks that it is a file
    try:
        return zarr.open_group(
            _folder_store()(path, read_only=True)
            if path.is_dir()
            else zarr.storage.ZipStore(path, mode="r"),
            mode="r",
        )
    except Exception as error:  # the library and its codecs raise their own exceptions
        _refuse_inner_folder(path)
        raise cut_off(path, f"it is not a Zarr group ({first_line(error)})") from None


def _refuse_inner_folder(path: Path) -> None:
    """Raises UserError if a zip file contains the folder of a group instead of its content."""
    entries: list[PurePosixPath] = []
    with (
        contextlib.suppress(zipfile.BadZipFile, OSError, ValueError, NotImplementedError),
        zipfile.ZipFile(path) as file,
    ):
        entries = [PurePosixPath(name) for name in file.namelist()]
    top = next(
        (
            entry.parts[0]
            for entry in entries
            if len(entry.parts) == 2 and entry.name in (".zgroup", "zarr.json")
        ),
        None,
    )
    if top is not None:
        what = (
            f"the zip file contains the folder {top}, but the arrays of a Zarr group must be "
            "at the top level"
        )
        raise UserError(what, str(path), f"zip the contents: cd {top} && zip -0r ../{path.name} .")


def _described(path: Path) -> list[str]:
    """Returns the names of everything with a file that describes an array, or a group in version
    3."""
    if path.is_file():
        with zipfile.ZipFile(path) as file:
            entries = [PurePosixPath(name) for name in file.namelist()]
        return sorted(
            {str(entry.parent) for entry in entries if entry.name in _DESCRIPTIONS} - {"."}
        )
    found = []
    for folder, folders, files in os.walk(path):
        if there := [name for name in _DESCRIPTIONS if name in files]:
            found.append(Path(folder).relative_to(path).as_posix())
            with FileOnDisk.at(Path(folder) / there[0]).opened() as file:
                is_array = there[0] == ".zarray" or _describes_array(
                    file.read(0, FileOnDisk.at(file.path).size)
                )
            if is_array:
                folders.clear()  # chunks, maybe a million of them
    return sorted(name for name in found if name != ".")


def _describes_array(raw: bytes | np.ndarray) -> bool:
    """Whether a file zarr.json describes an array. That of a group may contain those of its arrays,
    as consolidated metadata."""
    try:
        found = json.loads(bytes(raw))
    except ValueError:  # the library raises an error for it
        return False
    return isinstance(found, Mapping) and "chunk_grid" in found


@dataclass(frozen=True)
class ZarrGroup(StoredFile):
    path: Path

    @staticmethod
    def open(path: Path) -> ZarrGroup:
        _opened(path)
        return ZarrGroup(path)

    @property
    def names(self) -> list[str]:
        return sorted(
            name for name, array in self._members() if array.shape and array.dtype.kind in "iufb"
        )

    @property
    def without_numbers(self) -> Collection[str]:
        return [name for name, array in self._members() if array.dtype.kind not in "iufb"]

    def _members(self) -> list[tuple[str, Any]]:
        group = _opened(self.path)
        # one by one, because the library prints errors of others besides the one that it raises
        try:
            members = [(name, group[name]) for name in _described(self.path)]
            for _, member in members:
                _check_attributes(member)
        except Exception as error:
            raise cut_off(self.path, first_line(error)) from None
        return [(name, member) for name, member in members if hasattr(member, "chunks")]

    def array(self, name: str) -> StoredArray:
        array = self.opened(name)
        check_dtype(array.dtype, name, self.path, has_texts=True)  # _CODECS has no pickle
        rows = array.chunks[0] if array.shape else 1
        edges = block_edges(array.shape[0] if array.shape else 0, max(1, rows))
        return ZarrChunks(
            self, name, unpacked_dtype(array.dtype, _attributes(array)), tuple(array.shape), edges
        )

    @property
    def coordinates(self) -> Collection[str]:
        """Coordinates of dimensions, as xarray writes them."""
        return [
            name
            for name, array in self._members()
            if _dimensions(array) == [PurePosixPath(name).name]
        ]

    def note(self, name: str) -> str:
        array = self.opened(name)
        absent = array.nchunks - array.nchunks_initialized
        return (
            f"{absent:,} of {array.nchunks:,} chunks of {name} are not there, and are read as "
            f"{0 if array.fill_value is None else array.fill_value}"
            if absent
            else ""
        )

    def opened(self, name: str) -> Any:
        """Returns the array from the library. Raises UserError if it does not exist."""
        group = _opened(self.path)
        try:
            member = group[name.strip("/")]
            _check_attributes(member)
        except KeyError:
            raise no_such(name, self.names, self.path) from None
        except Exception as error:
            raise cut_off(self.path, f"{name}: {first_line(error)}") from None
        if not hasattr(member, "chunks"):
            raise no_such(f"array {name}, which is a group", self.names, self.path)
        check_chunks(
            tuple(member.shape), tuple(member.chunks), member.dtype.itemsize, name, self.path
        )
        if strange := sorted(_codecs(member.metadata.to_dict()) - _CODECS):
            what = (
                f"{name} is stored by the codec {strange[0]!r:.40}, which is not among those that "
                "hvdtrain reads"
            )
            fix = (
                "write it again with one of them: blosc, gzip, lz4, zlib, zstd; pickle is never "
                "read, as it could run code"
            )
            raise UserError(what, str(self.path), fix)
        return member

    def grid(self, name: str) -> Grid | None:
        array = self.opened(name)
        axes = _axes(array)
        return grid_of(name, axes, tuple(array.shape), dict(array.attrs), self._variable)

    def _variable(self, name: str) -> GridVariable | None:
        """Returns a coordinate with its axes; None if there is no such array of numbers or
        texts."""
        names = {one.strip("/"): one for one in (*self.names, *self.without_numbers)}
        if (stored := names.get(name.strip("/"))) is None:
            return None
        array = self.opened(stored)
        is_plain = array.dtype.kind in "iuf" or (len(array.shape) == 1 and array.dtype.kind in "UT")
        if not is_plain or not 1 <= len(array.shape) <= 2:
            return None
        attributes = described(dict(array.attrs))
        values = self.plane(stored)
        return GridVariable(PurePosixPath(name).name, tuple(_axes(array)), values, attributes)

    def values(self, name: str) -> np.ndarray:
        return self._values(name, 1)

    def plane(self, name: str) -> np.ndarray:
        return self._values(name, 2)

    def _values(self, name: str, most_axes: int) -> np.ndarray:
        array = self.opened(name)
        check_axes(tuple(array.shape), most_axes, name, self.path)
        try:
            found = np.asarray(array[:])
        except Exception as error:
            raise cut_off(self.path, f"{name}: {first_line(error)}") from None
        if found.dtype.kind in "iufb":
            attributes = _attributes(array)
            return unpacked(
                found, attributes, unpacked_dtype(array.dtype, attributes), f"{name} of {self.path}"
            )
        return np.array(
            [text.decode() if isinstance(text, bytes) else str(text) for text in found.tolist()],
            str,
        )


@dataclass(frozen=True, eq=False)
class ZarrChunks:
    """An array whose chunks of the same rows the library reads together. Each process opens it at
    its first read."""

    group: ZarrGroup
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    edges: np.ndarray = field(repr=False)
    _array: list[Any] = field(default_factory=list, repr=False)

    def __reduce__(self) -> tuple[object, ...]:
        return ZarrChunks, (self.group, self.name, self.dtype, self.shape, self.edges)

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        if not self._array:
            self._array.append(self.group.opened(self.name))
        rows = slice(int(self.edges[block]), int(self.edges[block + 1]))
        try:
            found = np.array(self._array[0][(rows, *box.slices)])
        except Exception as error:  # the library and its codecs raise their own exceptions
            raise cut_off(
                self.group.path,
                f"{self.name}, samples {rows.start} to {rows.stop - 1}: {first_line(error)}",
            ) from None
        if found.shape != (rows.stop - rows.start, *box.shape):
            raise UserError(
                f"{self.name} has changed since the job began",
                str(self.group.path),
                "start again, once nobody writes to it",
            )
        attributes = _attributes(self._array[0])
        if is_packed(attributes):
            return unpacked(found, attributes, self.dtype, f"{self.name} of {self.group.path}")
        return found.astype(self.dtype, copy=False)


def _check_attributes(member: Any) -> None:
    """Raises ValueError if the library would fail later."""
    if not isinstance(member.metadata.attributes, Mapping):
        raise ValueError(
            f"the attributes of {member.path or 'the group'} are "
            f"{member.metadata.attributes!r:.40}, expected names with values"
        )


def _codecs(value: Any, key: str = "") -> set[str]:
    """Returns the names of the codecs in the description of an array: `id` in version 2, `name` in
    version 3; includes the codecs within a shard."""
    if isinstance(value, (list, tuple)):
        return {name for one in value for name in _codecs(one, key)}
    if not isinstance(value, Mapping):
        return {str(value)} if key in _CODEC_KEYS and value is not None else set()
    found = {
        name
        for one, inner in value.items()
        if one not in ("attributes", "id", "name")
        for name in _codecs(inner, one)
    }
    name = value.get("id", value.get("name")) if key in _CODEC_KEYS else None
    return found if name is None else found | {str(name).removeprefix("numcodecs.")}


def _dimensions(array: Any) -> list[Any]:
    """Returns the names of the axes: from an attribute that xarray writes in version 2, from the
    format in version 3."""
    found = array.attrs.get("_ARRAY_DIMENSIONS", getattr(array.metadata, "dimension_names", None))
    return list(found) if isinstance(found, (list, tuple)) else []


def _axes(array: Any) -> list[str]:
    """Returns the name of each axis; empty without one."""
    names = _dimensions(array)
    whole = len(names) == len(array.shape)
    return [str(name or "") for name in names] if whole else [""] * len(array.shape)


def _attributes(array: Any) -> dict[str, Any]:
    """Returns the array's attributes, with a fill value that xarray wrote as 8 bytes in base64
    decoded to a number.

    In version 2 xarray writes `_FillValue` as the array's own fill_value. The library's default
    fill_value is 0, which does not mark a missing number.
    """
    attributes = dict(array.attrs)
    if "_ARRAY_DIMENSIONS" in attributes and array.dtype.kind in "iuf" and array.fill_value:
        attributes.setdefault("_FillValue", array.fill_value)
    fill = attributes.get("_FillValue")
    if isinstance(fill, str):
        with contextlib.suppress(ValueError, struct.error):
            attributes["_FillValue"] = struct.unpack("<d", base64.b64decode(fill, validate=True))[0]
        with contextlib.suppress(ValueError):
            attributes["_FillValue"] = float(fill)  # NaN, Infinity
    return attributes
