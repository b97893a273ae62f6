"""Arrays of .npz files. Arrays written by numpy.savez are read row by row from the archive;
compressed arrays are read as a whole."""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from hvdtrain.data.files.selection import Staging
from hvdtrain.data.source import Source, Split
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.science.stored.build import build_stored
from hvdtrain.extras.science.stored.options import Wanted
from hvdtrain.extras.science.stored.selection import SelectionBox
from hvdtrain.extras.science.stored.stored_array import (
    PlainRows,
    StoredArray,
    StoredFile,
    check_dtype,
    check_shape,
    no_such,
)
from hvdtrain.extras.split_files.files import FileOnDisk, cut_off

# header of a zip file's member: signature, length of the name, length of the extra field
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_NPY = b"\x93NUMPY"  # the first bytes of a numpy.save file
_HEADER_BYTES = 2**16  # at most, of an array
_MOST_VALUES = 2**34  # bytes of an array that is read as a whole
_DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    EOFError,
    ValueError,
    NotImplementedError,
    RuntimeError,
    struct.error,
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
    """Arrays of train.npz and val.npz in data.root, of several such files, or of one file with
    data.val_share or data.split_by.

    fields: the array of each field, {x: inputs, y: labels}; "inputs[:, 0:3]" is a part, a list is
        stacked (default: arrays x and y)
    dtypes: number types that fields are converted to, {x: float32}
    split_by: an array (n,) that marks validation samples: by the words train and val, or by the
        values of split_val
    split_val: values of split_by that mark validation samples, and ranges of them, "2003:2005"
    cache_mb: most megabytes of decoded blocks that a rank keeps for each set

    Raises UserError if files are damaged, lack a field, or hold pickled objects, which are never
    loaded.
    """
    wanted = Wanted(fields, dtypes or {}, split_by, split_val, cache_mb)
    return build_stored(name, root, split, (".npz",), NpzFile.open, wanted)


def read_numbers(path: Path, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads the arrays of a file by name, whole. Raises UserError."""
    try:
        archive = NpzFile.open(path)
        return {name: archive.values(name) for name in archive.names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(
            f"{path} cannot be read: {first_line(error)}",
            "--data",
            "a file that numpy.save or numpy.savez wrote",
        ) from None


@dataclass(frozen=True)
class NpzFile(StoredFile):
    file: FileOnDisk
    members: dict[str, zipfile.ZipInfo]

    @staticmethod
    def open(path: Path) -> NpzFile:
        """Opens the archive. Raises UserError if it is not an archive of arrays."""
        file = FileOnDisk.at(path)
        with file.opened() as opened:
            if opened.read(0, min(len(_NPY), file.size)) == _NPY:
                raise UserError(
                    "the file is one array of numpy.save, not an .npz archive of several",
                    str(path),
                    f"an array for each field: numpy.savez({path.stem!r:.60}, x=..., y=...)",
                )
        try:
            with zipfile.ZipFile(path) as archive:
                members = {
                    info.filename.removesuffix(".npy"): info
                    for info in archive.infolist()
                    if info.filename.endswith(".npy")
                }
        except (OSError, *_DAMAGE) as error:
            raise cut_off(path, f"it is not an .npz archive ({first_line(error)})") from None
        return NpzFile(file, members)

    @property
    def names(self) -> list[str]:
        return list(self.members)

    def array(self, name: str) -> StoredArray:
        if name not in self.members:
            raise no_such(name, self.names, self.file.path)
        info = self.members[name]
        if info.compress_type == zipfile.ZIP_STORED:
            return self._stored(info, name)
        dtype, shape = _compressed_header(self.file, info, name)
        check_dtype(dtype, name, self.file.path)
        return WholeMember(self.file, name, dtype, shape)

    def _stored(self, info: zipfile.ZipInfo, name: str) -> StoredArray:
        """Returns a member that is stored uncompressed."""
        path = self.file.path
        with self.file.opened() as file:
            signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(
                file.read(info.header_offset, _LOCAL_HEADER.size)
            )
            start = info.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
            if signature != b"PK\3\4":
                raise cut_off(path, f"{name} is not at the offset that its archive gives")
            head = io.BytesIO(file.read(start, min(_HEADER_BYTES, info.file_size)))
        try:
            dtype, shape, is_fortran = _array_header(head)
        except _DAMAGE as error:
            raise cut_off(path, f"{name}: {first_line(error)}") from None
        check_dtype(dtype, name, path)
        rows = PlainRows(self.file, start + head.tell(), dtype, shape)
        if head.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
            raise cut_off(
                path, f"{name} has {info.file_size} bytes, which do not fit {dtype} {shape}"
            )
        return WholeMember(self.file, name, dtype, shape) if is_fortran and len(shape) > 1 else rows

    def values(self, name: str) -> np.ndarray:
        """Reads a whole array (n,); strings are supported, too."""
        if name not in self.members:
            raise no_such(name, self.names, self.file.path)
        dtype, shape = _compressed_header(self.file, self.members[name], name)
        check_shape(shape, name, self.file.path)
        if math.prod(shape) * dtype.itemsize > _MOST_VALUES:
            what = (
                f"{name} is {dtype} {shape}, at most {_MOST_VALUES:,} bytes of an array that is "
                "read whole"
            )
            raise UserError(what, str(self.file.path), "a smaller one; or a file of numpy.save")
        return _load(self.file, name)


def _compressed_header(
    file: FileOnDisk, info: zipfile.ZipInfo, name: str
) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Reads type and shape of a member. Raises UserError if its number of bytes does not match."""
    try:
        with zipfile.ZipFile(file.path) as archive, archive.open(info) as member:
            dtype, shape, _ = _array_header(member)
            wanted = member.tell() + math.prod(shape) * dtype.itemsize
    except (OSError, *_DAMAGE) as error:
        raise cut_off(file.path, f"{name}: {first_line(error)}") from None
    if wanted != info.file_size and not dtype.hasobject:
        raise cut_off(
            file.path, f"{name} has {info.file_size} bytes, which do not fit {dtype} {shape}"
        )
    return dtype, shape


def _array_header(file: IO[bytes]) -> tuple[np.dtype[Any], tuple[int, ...], bool]:
    """Returns dtype, shape and whether the array is in Fortran order, and moves the file to the
    first value. Raises ValueError."""
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, is_fortran, dtype = read(file)
    except (
        Exception
    ) as error:  # numpy raises ValueError, tokenize.TokenError and more for a damaged header
        raise ValueError(first_line(error)) from None
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {shape}")
    return dtype, shape, is_fortran


def _load(file: FileOnDisk, name: str) -> np.ndarray:
    """Reads a whole array. Raises UserError if it is damaged or its checksum is wrong, or if it
    contains objects."""
    with file.opened():  # checks that the file has not changed
        pass
    try:
        with np.load(file.path, allow_pickle=False) as archive:
            return np.asarray(archive[name])
    except (OSError, *_DAMAGE) as error:
        raise cut_off(file.path, f"{name}: {first_line(error)}") from None


@dataclass(frozen=True, eq=False)
class WholeMember:
    """An array that can only be read as a whole, because it is compressed or in Fortran order. It
    is one block."""

    file: FileOnDisk
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    edges: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "edges", np.array([0, *self.shape[:1]], np.int64))

    def decode(self, block: int, box: SelectionBox) -> np.ndarray:
        array = _load(self.file, self.name)
        if array.shape != self.shape or array.dtype != self.dtype:
            raise UserError(
                f"{self.name} is now {array.dtype} {array.shape}",
                str(self.file.path),
                "start again",
            )
        return array[(slice(None), *box.slices)]
