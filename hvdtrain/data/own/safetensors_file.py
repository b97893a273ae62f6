"""The arrays of a .safetensors file, memory-mapped: samples are read from the file when a step needs them, and ranks share its pages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hvdtrain.errors import UserError, first_line

_DTYPES = {
    **{"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8"},
    **{"F16": "<f2", "F32": "<f4", "F64": "<f8"},
}


def read_safetensors(path: Path, name: str, where: str) -> dict[str, np.ndarray]:
    """Its arrays by name. Raises UserError where it is none, is damaged, or has numbers of a type that numpy does not know."""
    from safetensors import SafetensorError, safe_open

    if path.suffix != ".safetensors":
        raise UserError(f"{name} gave the path {path}", where, "a file NAME.safetensors (safetensors.numpy.save_file writes it), or arrays")
    try:
        with safe_open(path, framework="numpy"):  # checks the header, and that the arrays fill the file exactly
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{name} cannot be read: {first_line(error)}", str(path), "a file that safetensors.numpy.save_file wrote") from None
    arrays = {}
    for field, entry in header.items():
        if field == "__metadata__":
            continue
        if entry["dtype"] not in _DTYPES:
            raise UserError(f"{name} has {field} as {entry['dtype']}, which numpy does not know", str(path), "save it as F32 or F16")
        dtype, start = np.dtype(_DTYPES[entry["dtype"]]), 8 + length + entry["data_offsets"][0]
        shape = tuple(entry["shape"])
        empty = 0 in shape
        arrays[field] = np.zeros(shape, dtype) if empty else np.memmap(path, dtype, "r", start, shape)
    return arrays
