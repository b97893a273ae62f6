"""Damage to bytes and files, as functions of a random generator."""

from __future__ import annotations

import os
import socket
import struct
import zlib
from pathlib import Path
from typing import Any

from numpy.random import Generator

NUMBERS = (
    0,
    1,
    2,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**16,
    2**24,
    2**28,
    2**31 - 1,
    2**31,
    2**32 - 1,
)


def chance(rng: Generator, share: float) -> bool:
    return bool(rng.random() < share)


def pick(rng: Generator, values: Any) -> Any:
    return values[int(rng.integers(len(values)))]


def mutated(rng: Generator, data: bytes) -> bytes:
    """`data` after one to four harms, half of them in its first 64 bytes."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 5))):
        place = int(
            rng.integers(0, 1 + (min(64, len(changed)) if chance(rng, 0.5) else len(changed)))
        )
        length = int(2 ** rng.uniform(0, 8))
        match int(rng.integers(7)):
            case 0 if place < len(changed):
                changed[place] ^= 1 << int(rng.integers(8))
            case 1:
                changed[place:place] = rng.bytes(length)
            case 2:
                del changed[place : place + length]
            case 3:
                changed[place:place] = changed[place : place + length] * int(rng.integers(1, 20))
            case 4:
                del changed[place:]
            case 5:
                changed[place : place + 4] = struct.pack(
                    pick(rng, ("<I", ">I")), pick(rng, NUMBERS)
                )
            case _:
                changed[place : place + length] = changed[: len(changed[place : place + length])]
    return bytes(changed)


def odd(rng: Generator, path: Path) -> None:
    """Something at `path` that is no file, or one without end or content."""
    path.unlink(missing_ok=True)
    match int(rng.integers(9)):
        case 0:
            path.write_bytes(b"")
        case 1:
            path.mkdir()
        case 2:
            os.mkfifo(path)
        case 3:
            with path.open("wb") as file:
                file.write(rng.bytes(16))
                # sparse: no disk, and more than any memory here
                file.truncate(pick(rng, (2**33, 3073 * 10**6)))
        case 4:
            path.symlink_to(path.name)
        case 5:
            with socket.socket(socket.AF_UNIX) as door:
                # the path itself may be too long for a socket
                near = os.open(path.parent, os.O_RDONLY)
                try:
                    door.bind(f"/proc/self/fd/{near}/{path.name}")
                except OSError:
                    path.write_bytes(b"")
                finally:
                    os.close(near)
        case _:
            path.symlink_to(
                pick(
                    rng,
                    (
                        "/dev/zero",
                        "/dev/urandom",
                        "/dev/null",
                        "/etc/passwd",
                        "/nowhere",
                        "..",
                        "/proc/self/mem",
                    ),
                )
            )


def zeros(length: int) -> bytes:
    """A raw deflate stream of so many zeros: one byte for about 1000."""
    pack = zlib.compressobj(9, zlib.DEFLATED, -15)
    # a block after a full flush needs nothing before it
    block = pack.compress(bytes(2**20)) + pack.flush(zlib.Z_FULL_FLUSH)
    return block * (length // 2**20) + pack.compress(bytes(length % 2**20)) + pack.flush()
