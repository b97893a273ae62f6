"""Arrays in .npy files: written completely or not at all, and read memory-mapped. Images have a
checksum for each block."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from hvdtrain.errors import UserError


def load_npy(path: Path, dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> np.ndarray | None:
    """Returns the array in the file, memory-mapped; None if the file is absent, holds another
    array, or its length does not match its header.

    None in `shape` is any length. The numbers in the array are not checked. Pickled arrays are
    never loaded.
    """
    if not path.is_file():
        return None
    try:
        x = np.lib.format.open_memmap(path, mode="r")
    except Exception:
        # numpy raises OSError, ValueError, EOFError, tokenize.TokenError and more for a damaged
        # header
        return None
    if x.dtype != dtype or len(x.shape) != len(shape) or not x.flags.c_contiguous:
        return None
    if any(expected not in (None, found) for found, expected in zip(x.shape, shape, strict=True)):
        return None
    return np.asarray(x) if path.stat().st_size == x.offset + x.nbytes else None


@contextmanager
def write_npy(path: Path, dtype: str, shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    """Yields a file, positioned after its header, for the array's bytes. The file gets its name
    when it is complete and on the disk.

    If writing fails, it is removed. Raises OSError.
    """
    partial = path.with_suffix(".part")
    partial.unlink(missing_ok=True)  # left by a process that was killed
    try:
        with partial.open("xb") as out:  # x: never through a link
            np.lib.format.write_array_header_1_0(
                out, {"descr": dtype, "fortran_order": False, "shape": shape}
            )
            out.flush()
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)  # up to 1 GiB
        raise


_BLOCK_BYTES = 2**16  # reading one small image checks at most this many bytes
MOST_ROWS = 64  # in a block
_AGAIN = "start again: its images are decoded again"


def rows_of_block(shape: tuple[int, ...]) -> int:
    """Returns the number of images, of shape[1:], that share a checksum: a power of two, so that it
    divides MOST_ROWS."""
    rows = min(MOST_ROWS, max(1, _BLOCK_BYTES // math.prod(shape[1:])))
    return 1 << rows.bit_length() - 1


def checksums(images: np.ndarray, rows: int) -> list[int]:
    """Computes XXH3, 64 bits, of each block of `rows` images; the last block may be shorter."""
    return [
        xxhash.xxh3_64_intdigest(images[start : start + rows].data)
        for start in range(0, len(images), rows)
    ]


def checksum_path(path: Path) -> Path:
    """Returns the path of the checksums of an array file."""
    return path.with_name(f"{path.name}.xxh3")


def write_checksums(path: Path, sums: np.ndarray) -> None:
    """Writes the checksums, uint64 (blocks,), of the array file at `path`. Raises OSError."""
    with write_npy(checksum_path(path), "<u8", sums.shape) as out:
        out.write(sums.astype("<u8").tobytes())


@dataclass(frozen=True, eq=False)
class CheckedArray:
    """An array file of images. A block is compared with its checksum when one of its images is
    first read.

    A file that shrinks while it is mapped would end the process with a bus error, so each read
    checks its length first.
    """

    path: Path
    images: np.ndarray  # uint8 (rows, H, W, C), memory-mapped
    sums: np.ndarray  # uint64 (blocks,)
    checked: np.ndarray = field(init=False)  # bool (blocks,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "checked", np.zeros(len(self.sums), bool))

    def __len__(self) -> int:
        return len(self.images)

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Returns copies of the images at `rows`, int64 (n,). Safe to call from several threads.
        Raises UserError for a damaged block."""
        # the file was removed; its mapping remains valid
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_size < self.images.nbytes:
                raise UserError(
                    "cached images were cut off while they were in use", str(self.path), _AGAIN
                )
        blocks = rows // rows_of_block(self.images.shape)
        for block in np.unique(blocks[~self.checked[blocks]]).tolist():
            if not self._is_sound(block):
                raise self._damaged(block)
            self.checked[block] = True
        return np.asarray(self.images[rows])

    def is_sound(self) -> bool:
        """Whether every block matches its checksum; takes 0.1 s for each GiB in memory."""
        return all(self._is_sound(block) for block in range(len(self.sums)))

    def _is_sound(self, block: int) -> bool:
        rows = rows_of_block(self.images.shape)
        return checksums(self.images[block * rows : (block + 1) * rows], rows) == [
            int(self.sums[block])
        ]

    def _damaged(self, block: int) -> UserError:
        """Removes the file, so that the next start recreates it, and returns the error. Existing
        mappings of it remain valid."""
        with contextlib.suppress(OSError):
            self.path.unlink()
        rows = rows_of_block(self.images.shape)
        last = min((block + 1) * rows, len(self)) - 1
        what = (
            f"cached images were altered after they had been written: images {block * rows} to "
            f"{last} of the file"
        )
        return UserError(
            what, str(self.path), f"remove it; {_AGAIN}" if self.path.exists() else _AGAIN
        )


def load_checked(path: Path, shape: tuple[int, ...]) -> CheckedArray | None:
    """Loads the array file at `path` with its checksums; None if either is absent or does not have
    this shape."""
    images = load_npy(path, np.dtype(np.uint8), shape)
    sums = load_npy(checksum_path(path), np.dtype("<u8"), (-(-shape[0] // rows_of_block(shape)),))
    return None if images is None or sums is None else CheckedArray(path, images, sums)
