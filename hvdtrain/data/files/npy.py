"""Arrays in .npy files: written whole or not at all, and read back memory-mapped, with their shape checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np


def load_npy(path: Path, dtype: np.dtype[Any], shape: tuple[int | None, ...]) -> np.ndarray | None:
    """The array in the file, memory-mapped; None where the file is absent, holds another array, or has not the length of its header.

    None in `shape` is any length. The numbers in the array are not checked. Pickled arrays are never loaded.
    """
    if not path.is_file():
        return None
    try:
        x = np.lib.format.open_memmap(path, mode="r")
    except Exception:  # numpy raises OSError, ValueError, EOFError, tokenize.TokenError and more for a damaged header
        return None
    if x.dtype != dtype or len(x.shape) != len(shape) or not x.flags.c_contiguous:
        return None
    if any(expected not in (None, found) for found, expected in zip(x.shape, shape, strict=True)):
        return None
    return np.asarray(x) if path.stat().st_size == x.offset + x.nbytes else None


@contextmanager
def write_npy(path: Path, dtype: str, shape: tuple[int, ...]) -> Iterator[IO[bytes]]:
    """A file to which the array's bytes are written, behind its header. It gets its name once it is complete and on the disk.

    It is removed where that fails. Raises OSError.
    """
    partial = path.with_suffix(".part")
    partial.unlink(missing_ok=True)  # left by a process that was killed
    try:
        with partial.open("xb") as out:  # x: never through a link
            np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
            out.flush()
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)  # up to 1 GiB
        raise
