"""JPEG files by PIL's decoder alone, at full or reduced scale: of a small image, PIL.Image.open() takes longer than decoding."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

_SEGMENT = Struct(">BBH")  # 255, marker, length
_FRAME = Struct(">BHHB")  # bits, height, width, channels
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_OTHERS = (*range(0xE0, 0xF0), 0xC4, 0xDB, 0xDD, 0xFE)  # applications' own, tables, restarts, comment: they may come before the frame
_MODES = {1: "L", 3: "RGB"}
_SCALES = (8, 4, 2)  # of the decoder: it leaves out the high frequencies, and the work for them


class JpegHeader(NamedTuple):
    height: int
    width: int
    mode: str  # of PIL: L or RGB


def read_header(content: bytes) -> JpegHeader | None:
    """Of a JPEG file with 8 bits a channel in 1 or 3 channels; None of any other file, and of an unusual one."""
    if content[:2] != b"\xff\xd8":
        return None
    at = 2
    while at + _SEGMENT.size + _FRAME.size <= len(content):
        prefix, marker, length = _SEGMENT.unpack_from(content, at)
        if prefix == 0xFF and marker in _FRAMES:
            bits, height, width, channels = _FRAME.unpack_from(content, at + _SEGMENT.size)
            usual = bits == 8 and channels in _MODES and height > 0 and width > 0
            return JpegHeader(height, width, _MODES[channels]) if usual else None
        if prefix != 0xFF or marker not in _OTHERS or length < 2:
            return None
        at += 2 + length
    return None


def decode_jpeg(content: bytes, header: JpegHeader, scale: int) -> Image:
    """All of it, with 1 / scale of its height and width, rounded up. Raises ValueError where it is damaged or cut off."""
    from PIL.Image import frombytes

    size = -(-header.width // scale), -(-header.height // scale)
    return frombytes(header.mode, size, content, "jpeg", header.mode, "", scale, 0)


def coarsest_scale(box: tuple[float, float], wanted: tuple[int, ...]) -> int:
    """Of decode_jpeg(): the box, its height and width, then still has the pixels that are wanted, so resizing makes none up."""
    return next((scale for scale in _SCALES if box[0] >= scale * wanted[0] and box[1] >= scale * wanted[1]), 1)
