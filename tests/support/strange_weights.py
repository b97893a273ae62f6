"""Files of weights as a damaged disk or a stranger may make them: name -> bytes, for torch's two
formats and for safetensors."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

ARRAY = torch.arange(12.0).reshape(3, 4)
DATA = ARRAY.numpy().tobytes()
ENTRY = {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}


def saved(tree: Any, *, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(tree, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


class Runs:
    """Unpickled, it would end the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (99,)


def _trees() -> dict[str, Any]:
    cycle: dict[str, Any] = {"w": ARRAY}
    cycle["again"] = cycle
    ring: list[Any] = []
    ring.append(ring)
    deep: Any = ARRAY
    for _ in range(300):
        deep = {"a": deep}
    pair = ARRAY.to(torch.complex64).conj()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        odd = {
            "csr": ARRAY.to_sparse_csr(),
            "nested": torch.nested.nested_tensor([ARRAY[0], ARRAY[1][:2]]),
            "quantized": torch.quantize_per_tensor(ARRAY, 0.1, 0, torch.qint8),
        }
    return {
        **{kind: {"w": tensor} for kind, tensor in odd.items()},
        **{
            f"{dimensions} dimensions": {"w": torch.zeros([1] * dimensions)}
            for dimensions in (33, 64, 65, 100)
        },
        **{
            f"{dtype}": {"w": ARRAY.to(dtype)}
            for dtype in (
                torch.float8_e4m3fn,
                torch.float8_e5m2,
                torch.complex64,
                torch.bfloat16,
                torch.uint16,
                torch.bool,
            )
        },
        "tensor": ARRAY,
        "list": [ARRAY],
        "int": 3,
        "none": None,
        "empty": {},
        "plain": {"w": ARRAY},
        "in order": collections.OrderedDict(w=ARRAY),
        "cycle": cycle,
        "cycle inside": {"state_dict": cycle},
        "ring": {"w": ARRAY, "l": ring},
        "deep": deep,
        "meta": {"w": torch.empty(10**12, device="meta")},
        "sparse": {"w": ARRAY.to_sparse()},
        "conjugate": {"w": pair},
        "negative": {"w": pair.imag},
        "expanded": {"w": torch.zeros(1).expand(10**6, 10**6)},
        "numbers alone": {"epoch": 3},
        "sizes": {"w": torch.Size([1])},
        "names of other types": {1: ARRAY, None: ARRAY, (1, 2): ARRAY},
        "one name twice": {1: ARRAY, "1": ARRAY},
        "name with a line": {"a\nb": ARRAY},
        "name that is half a letter": {"\ud800": ARRAY},
        "long name": {"x" * 10_000: ARRAY},
        "code": {"w": ARRAY, "x": Runs()},
    }


def torch_files() -> Iterator[tuple[str, bytes]]:
    for name, tree in _trees().items():
        for zipped in (True, False):
            if zipped or name != "nested":
                yield f"{name}, {'zip' if zipped else 'legacy'}", saved(tree, zipped=zipped)
    for zipped in (True, False):
        whole = saved({"w": ARRAY}, zipped=zipped)
        for length in (0, 1, 5, len(whole) // 3, len(whole) // 2, len(whole) - 30, len(whole) - 1):
            yield f"{length} bytes, zip {zipped}", whole[:length]
        for at in range(20, len(whole), len(whole) // 12):
            yield (
                f"byte {at} altered, zip {zipped}",
                whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :],
            )
        yield f"zeros, zip {zipped}", bytes(len(whole))
    whole = saved({"w": ARRAY})
    is_data: Callable[[str], bool] = lambda name: name.endswith("/data/0")  # noqa: E731
    yield "zip compressed", _rezipped(whole, lambda name, data: data)
    yield "zip bomb", _rezipped(whole, lambda name, data: bytes(2**26) if is_data(name) else data)
    yield (
        "zip bomb of a pickle",
        _rezipped(
            whole, lambda name, data: data + bytes(2**26) if name.endswith("data.pkl") else data
        ),
    )
    yield "zip without data", _rezipped(whole, lambda name, data: None if is_data(name) else data)
    yield (
        "zip without a pickle",
        _rezipped(whole, lambda name, data: None if name.endswith("data.pkl") else data),
    )
    yield (
        "zip with less data",
        _rezipped(whole, lambda name, data: data[:8] if is_data(name) else data),
    )
    yield "zip of nothing", b"PK\5\6" + bytes(18)
    yield "more numbers than the file", whole.replace(b"K\x0c", b"K\xff")
    yield "a shape beyond the storage", whole.replace(b"K\x03K\x04\x86", b"K\x63K\x63\x86")
    yield "pickle", pickle.dumps({"w": 1})
    yield "pickle of code", pickle.dumps(Runs())
    yield "pickle of a terabyte", b"\x80\x04\x8e" + struct.pack("<Q", 2**40)


def _rezipped(whole: bytes, change: Callable[[str, bytes], bytes | None]) -> bytes:
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(whole)) as old,
        zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            if (data := change(entry.filename, old.read(entry))) is not None:
                new.writestr(entry.filename, data)
    return file.getvalue()


def tensors_file(header: Any, data: bytes = DATA, length: int | None = None) -> bytes:
    """header: bytes as they are, or what becomes JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def safetensors_files() -> Iterator[tuple[str, bytes]]:
    entry = json.dumps(ENTRY).encode()
    yield from {
        "empty": b"",
        "two bytes": b"\1\2",
        "length 0": bytes(8),
        "a number": tensors_file({"w": {**ENTRY, "shape": [], "data_offsets": [0, 4]}}, DATA[:4]),
    }.items()
    for length in (10**8, 2**40, 2**63):
        yield f"header of {length} bytes", tensors_file(b"{}", length=length)
    for header in (
        b"{x",
        b"[" * 200_000,
        b'{"__metadata__":' + b'{"a":' * 50_000,
        json.dumps({"w": ENTRY}).encode("utf-16"),
        [],
        None,
        3,
        {},
    ):
        yield f"header {header!r:.20}", tensors_file(header)
    yield "numbers in the metadata", tensors_file({"__metadata__": 3, "w": ENTRY})
    for shape in (
        [-3, -4],
        [3.0, 4],
        [2**62, 4],
        [2**32, 2**32],
        [3, 4] + [1] * 100,
        [12] + [1] * 63,
        [12] + [1] * 64,
    ):
        yield (
            f"shape {str(shape)[:20]} of {len(shape)}",
            tensors_file({"w": {**ENTRY, "shape": shape}}),
        )
    for offsets in ([0, 480], [48, 0], [-1, 47], [0, 1, 2], None):
        yield f"offsets {offsets}", tensors_file({"w": {**ENTRY, "data_offsets": offsets}})
    for dtype, numbers in {
        "F8_E4M3": 48,
        "F8_E5M2": 48,
        "F8_E8M0": 48,
        "F4": 96,
        "F6_E2M3": 64,
        "X": 12,
        "object": 12,
        "C64": 6,
        "BF16": 24,
    }.items():
        yield (
            f"type {dtype}",
            tensors_file({"w": {"dtype": dtype, "shape": [numbers], "data_offsets": [0, 48]}}),
        )
    yield "overlapping", tensors_file({"a": ENTRY, "b": ENTRY})
    yield (
        "with a gap",
        tensors_file(
            {
                "a": {**ENTRY, "shape": [1], "data_offsets": [0, 4]},
                "b": {**ENTRY, "shape": [1], "data_offsets": [44, 48]},
            }
        ),
    )
    yield "one name twice", tensors_file(b'{"w":' + entry + b',"w":' + entry + b"}")
    yield "name with codes", tensors_file({"a\nb\0": ENTRY})
    yield "half a letter", tensors_file(b'{"\\ud800":' + entry + b"}")
    yield "a byte more", tensors_file({"w": ENTRY}, DATA + b"x")
    yield "a byte less", tensors_file({"w": ENTRY}, DATA[:-1])
    yield (
        "80 dimensions of nothing",
        tensors_file({"w": {**ENTRY, "shape": [0] * 80, "data_offsets": [0, 0]}}, b""),
    )
    yield "plain", tensors_file({"w": ENTRY})
