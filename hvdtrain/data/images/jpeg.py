"""JPEG files by PIL's decoder alone, at full or reduced scale: of a small image, PIL.Image.open() takes longer than decoding."""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from PIL.Image import Image

_SEGMENT = Struct(">BBH")  # 255, marker, length
_FRAME = Struct(">BHHB")  # bits, height, width, channels
_PROGRESSIVE, _SCAN = 0xC2, 0xDA
_FRAMES = (0xC0, 0xC1, _PROGRESSIVE)  # baseline, extended
_OTHERS = (*range(0xE0, 0xF0), 0xC4, 0xDB, 0xDD, 0xFE)  # applications' own, tables, restarts, comment: before frame and scan
_MODES = {1: "L", 3: "RGB"}
_SCALES = (8, 4, 2)  # of the decoder: it leaves out the high frequencies, and the work for them


class JpegHeader(NamedTuple):
    height: int
    width: int
    mode: str  # of PIL: L or RGB
    has_one_scan: bool  # the decoder goes over the pixels once, and refuses a second scan


def read_header(content: bytes) -> JpegHeader | None:
    """The header of a JPEG file with 8 bits a channel in 1 or 3 channels; None of any other file, and of an unusual one."""
    frame = _find(content, 2, _FRAMES) if content[:2] == b"\xff\xd8" else None
    if frame is None:
        return None
    bits, height, width, channels = _FRAME.unpack_from(content, frame + _SEGMENT.size)
    if bits != 8 or channels not in _MODES or height == 0 or width == 0:
        return None
    _, marker, length = _SEGMENT.unpack_from(content, frame)
    scan = _find(content, frame + 2 + length, (_SCAN,))
    all_in_first = scan is not None and content[scan + _SEGMENT.size] == channels
    return JpegHeader(height, width, _MODES[channels], marker != _PROGRESSIVE and all_in_first)


def _find(content: bytes, at: int, markers: tuple[int, ...]) -> int | None:
    """Where the first segment of one of these markers begins, from `at` on; None where one that is not usual before it comes first."""
    while at + _SEGMENT.size + _FRAME.size <= len(content):
        prefix, marker, length = _SEGMENT.unpack_from(content, at)
        if prefix == 0xFF and marker in markers:
            return at
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
    """The coarsest scale for decode_jpeg() at which the box, its height and width, still has the pixels that are wanted."""
    return next((scale for scale in _SCALES if box[0] >= scale * wanted[0] and box[1] >= scale * wanted[1]), 1)
