"""Image files: valid ones, bombs, and broken ones."""

from __future__ import annotations

import functools
import io
import struct
import zlib
from typing import Any

import numpy as np
from fuzz_bytes import NUMBERS, chance, mutated, pick, zeros
from numpy.random import Generator
from PIL import Image

PNG = b"\x89PNG\r\n\x1a\n"


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width: int, height: int, depth: int = 8, colour: int = 0, extra: bytes = b"") -> bytes:
    """Returns an image of zeros, grey with these defaults. It contains all pixels if they are at
    most 256 MiB."""
    channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(colour, 1)
    length = min(height * (1 + (width * depth * channels + 7) // 8), 2**28)
    # Adler's checksum of zeros
    packed = b"\x78\x9c" + zeros(length) + struct.pack(">I", (length % 65521) << 16 | 1)
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    palette = chunk(b"PLTE", bytes(768)) if colour == 3 else b""
    return (
        PNG
        + chunk(b"IHDR", header)
        + palette
        + extra
        + chunk(b"IDAT", packed)
        + chunk(b"IEND", b"")
    )


def rle_bmp(width: int, height: int) -> bytes:
    """4 bytes for each row: one pixel, end of line."""
    body = b"\1\1\0\0" * height
    offset = 14 + 40 + 1024
    header = b"BM" + struct.pack("<IHHI", offset + len(body), 0, 0, offset)
    header += struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(body), 0, 0, 256, 0)
    return header + bytes(1024) + body


@functools.cache
def sound_images() -> tuple[bytes, ...]:
    """16 x 16 in every mode of every format that is read, and in some that are not."""
    pixels = np.arange(16 * 16 * 4, dtype=np.uint16).reshape(16, 16, 4)
    colour = Image.fromarray(pixels.astype(np.uint8), "RGBA")
    ways: list[tuple[str, str, dict[str, Any]]] = [
        ("PNG", mode, {}) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")
    ]
    ways += [
        ("JPEG", mode, {"progressive": late})
        for mode in ("L", "RGB", "CMYK")
        for late in (False, True)
    ]
    ways += [("BMP", mode, {}) for mode in ("1", "L", "P", "RGB", "RGBA")]
    ways += [
        ("WEBP", mode, {"lossless": exact}) for mode in ("RGB", "RGBA") for exact in (False, True)
    ]
    ways += [
        (other, "RGB", {}) for other in ("GIF", "TIFF", "ICO", "PPM", "TGA", "PDF", "EPS", "MPO")
    ]
    files = [rle_bmp(16, 16), png_of(16, 16, 16)]
    for kind, mode, options in ways:
        out = io.BytesIO()
        colour.convert(mode).save(out, kind, **options)
        files.append(out.getvalue())
    out = io.BytesIO()
    colour.save(out, "PNG", save_all=True, append_images=[colour] * 3)
    return (*files, out.getvalue())


@functools.cache
def image_bombs() -> tuple[bytes, ...]:
    """Small files of many pixels, of much text, or of much work."""
    out = io.BytesIO()
    Image.new("L", (6000, 6000), 9).save(out, "JPEG", progressive=True)
    scans = out.getvalue()
    last = scans.rindex(b"\xff\xda")
    text = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**26), 9))
    few = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**20 - 9), 9))
    profile = chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(2**28), 9))
    return (
        *(
            png_of(side, side, 8, colour)
            for side, colour in (
                (9000, 0),
                (9000, 6),
                (8000, 4),
                (6000, 6),
                (60000, 0),
                (2**31 - 1, 2),
            )
        ),
        *(png_of(width, 1) for width in (2**16, 2**26, 2**28)),
        *(
            png_of(16, 16, extra=extra)
            for extra in (text, few * 100, profile, chunk(b"acTL", b"\xff" * 8) * 1000)
        ),
        scans[:last] + scans[last:-2] * 3000 + scans[-2:],
        rle_bmp(9000, 9000),
        rle_bmp(60000, 1400),
    )


def broken_image(rng: Generator) -> bytes:
    """A bomb, or a sound image with harms: half of those to a PNG keep its checksums right."""
    if chance(rng, 0.015):
        return pick(rng, image_bombs())
    data = pick(rng, sound_images())
    if not data.startswith(PNG) or chance(rng, 0.5):
        return mutated(rng, data)
    kind, width, height = (
        pick(rng, (b"IDAT", b"PLTE", b"tRNS", b"zTXt", b"iCCP", b"eXIf", b"fdAT", b"gAMA")),
        *pick_sides(rng),
    )
    extra = chunk(kind, rng.bytes(int(2 ** rng.uniform(0, 10)))) * int(rng.integers(3))
    header = data[16:24] if chance(rng, 0.5) else struct.pack(">II", width, height)
    header += mutated(rng, data[24:29])[:5].ljust(5, b"\0") if chance(rng, 0.5) else data[24:29]
    return PNG + chunk(b"IHDR", header) + extra + data[33:]


def pick_sides(rng: Generator) -> tuple[int, int]:
    return pick(rng, NUMBERS), pick(rng, NUMBERS)
