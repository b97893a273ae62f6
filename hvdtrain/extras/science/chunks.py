"""Chunks of an array: limits on their number and size, and the rows that are decoded together."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from hvdtrain.errors import UserError
from hvdtrain.extras.science.stored.stored_array import check_shape
from hvdtrain.extras.split_files.files import cut_off

_MOST_CHUNKS = 2**25
_MOST_CHUNK_BYTES = 2**32  # the limit of HDF5


def check_chunks(
    shape: tuple[int, ...], chunks: tuple[int, ...], item_bytes: int, name: str, path: Path
) -> None:
    """Raises UserError for chunks that are empty, too large to be unpacked, or too many to be
    listed in memory."""
    check_shape(shape, name, path)
    if min(chunks, default=1) < 1:
        raise cut_off(path, f"{name} has chunks of shape {chunks}")
    if math.prod(chunks) * item_bytes > _MOST_CHUNK_BYTES:
        what = (
            f"{name} has chunks of shape {chunks}, at most {_MOST_CHUNK_BYTES:,} bytes, which are "
            "read whole"
        )
        raise UserError(what, str(path), "write it again in smaller chunks")
    count = math.prod(-(-size // chunk) for size, chunk in zip(shape, chunks, strict=True))
    if count > _MOST_CHUNKS:
        what = (
            f"{name}, of shape {shape}, is stored in {count:,} chunks of shape {chunks}, at most "
            f"{_MOST_CHUNKS:,}"
        )
        raise UserError(what, str(path), "write it again in larger chunks")


def block_edges(rows: int, of_block: int) -> np.ndarray:
    """Returns Blocks.edges of an array in equal blocks; the last one may be shorter."""
    of_block = min(of_block, max(1, rows))
    return np.minimum(np.arange(0, rows + of_block, of_block), rows).astype(np.int64)
