"""Decodes one image in bounded memory and time. Every defect raises a UserError that names the
image."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from struct import Struct
from threading import Condition
from typing import TYPE_CHECKING, NamedTuple

from hvdtrain.data.option_error import OptionError
from hvdtrain.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile


# returns the name of an image for messages; only called on errors, because it searches the archive
Name = Callable[[], str]
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")
_MOST_SIDE = 2**13  # largest data.size, in pixels
# detected by content, whatever the suffix: some PIL formats start other programs
_FORMATS = (
    "JPEG",
    "PNG",
    "BMP",
    "WEBP",
    "TIFF",
    "GIF",
    "PPM",
)
_MOST_BEFORE_EXIF = 2**18  # bytes of a JPEG file before its EXIF data: a segment has at most 64 KiB
MOST_BYTES = 2**27  # of an image file
_MOST_PIXELS = 2**26  # ImageNet's largest image has 61 million
_ORIENTATION = 0x112  # the tag of EXIF
# limit for a JPEG file and its thumbnail. Encoders write 10 scans. Each one is a pass over all
# pixels: 400 kB of scans take 80 s
_MOST_SCANS = 100


class _PixelBudget:
    """Limits the pixels that all threads together decode at once; a pixel takes up to 11 bytes of
    memory."""

    def __init__(self, pixels: int) -> None:
        self._free = pixels
        self._changed = Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Waits until this many pixels are free."""
        with self._changed:
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


_pixel_budget = _PixelBudget(_MOST_PIXELS)


def check_image_options(size: int | None, channels: int) -> None:
    """Raises OptionError for a size or channels that no image can have."""
    if channels not in _MODES or (size is not None and not 1 <= size <= _MOST_SIDE):
        what = f"images of size {size} with {channels} channels are impossible"
        raise OptionError(
            what,
            "size" if channels in _MODES else "channels",
            f"data.channels is 1 or 3, data.size is 1 to {_MOST_SIDE}",
        )


def check_file(file: str | Path) -> os.stat_result:
    """Returns the status of a regular file of at most MOST_BYTES. Raises OSError, and UserError for
    any other file: a pipe or a device may never end."""
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise UserError("the image is not a regular file", str(file), "remove it")
    if status.st_size > MOST_BYTES:
        raise UserError(
            f"the image is a file of {status.st_size} bytes, at most {MOST_BYTES}",
            str(file),
            "make it smaller, or remove it",
        )
    return status


def read_file(file: str) -> bytes:
    """Reads an image file. Raises UserError.

    `file` is a string and is read by system calls, because a Path and a Python file object would
    take as long as the reading itself.
    """
    try:
        size = check_file(file).st_size
        opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(opened, size)
            while len(content) < size and (
                more := os.read(opened, size - len(content))
            ):  # a network file system may return fewer bytes
                content += more
            return content
        finally:
            os.close(opened)
    except OSError as error:
        raise _unreadable(error, file) from error


class CropBox(NamedTuple):
    """A part of an image, in its pixels."""

    top: float
    left: float
    height: float
    width: float
    may_be_coarse: bool = False  # may be decoded with fewer pixels, if that suffices


def centre_square(height: int, width: int) -> CropBox:
    """Returns the centre square of an image of height x width."""
    side = min(height, width)
    return CropBox((height - side) / 2, (width - side) / 2, side, side)


class Undecoded:
    """An image file; only its header has been read. Raises UserError if the header is damaged, or
    decoding would cost too much."""

    def __init__(self, content: bytes, name: Name, upright: bool = False) -> None:
        """upright: first rotate the image by its EXIF orientation."""
        self.name = name
        self._content = content
        self._jpeg = _usual_jpeg(content)
        self._image = None if self._jpeg else _open(content, name)
        header = self._jpeg or self._image
        assert header is not None
        self._stored = header.height, header.width
        self._orientation = self._read_orientation() if upright else 1
        self.height, self.width = self._stored if self._orientation < 5 else self._stored[::-1]

    def pixels(self, shape: tuple[int, ...], box: CropBox | None) -> bytes:
        """Returns uint8 of `shape`, (H, W, C): the box, resized with antialiasing; without a box
        the whole image, which must be H x W.

        Safe to call from several threads; PIL releases the interpreter lock. Raises UserError if
        the image is damaged.
        """
        with _pixel_budget.reserve(self.height * self.width * (1 if self._orientation == 1 else 2)):
            if self._jpeg is not None:
                scale = (
                    coarsest_scale((box.height, box.width), shape[:2])
                    if box is not None and box.may_be_coarse
                    else 1
                )
                with suppress(ValueError):  # it is damaged; PIL.Image.open() reports how
                    return _resized(
                        _turned(decode_jpeg(self._content, self._jpeg, scale), self._orientation),
                        shape,
                        box,
                        scale,
                    )
            image = self._image or _open(self._content, self.name)
            if image.mode[0] in "IF":
                what = f"the image has more than 8 bits a channel (mode {image.mode})"
                raise UserError(what, self.name(), "convert it to 8 bits a channel")
            with _named_errors(self.name):
                return _resized(_turned(image, self._orientation), shape, box, 1)

    def _read_orientation(self) -> int:
        """Returns the orientation, 1 (upright) to 8; PIL turns TIFF files itself."""
        image = self._image
        if image is None:
            if b"Exif" not in self._content[:_MOST_BEFORE_EXIF]:
                return 1
            image = _open(self._content, self.name)
        if image.format == "TIFF":
            return 1
        with _named_errors(self.name):
            orientation = image.getexif().get(_ORIENTATION, 1)
        return orientation if orientation in range(1, 9) else 1


def height_and_width(content: bytes, name: Name, upright: bool = False) -> tuple[int, int]:
    """Returns height and width of an image, from its header only. Raises UserError."""
    image = Undecoded(content, name, upright)
    return image.height, image.width


def mask_numbers(
    content: bytes, shape: tuple[int, int], box: CropBox | None, name: Name
) -> np.ndarray:
    """Returns uint8 (H, W), the pixel values of a mask (palette indices if it has a palette),
    resampled from the box by the nearest pixel; without a box, the whole mask.

    Raises UserError for an image with colours or more than 8 bits, and for a damaged one.
    """
    import numpy as np
    from PIL.Image import Resampling

    image = _open(content, name)
    if image.mode not in ("1", "L", "P"):
        what = f"the mask has pixels of mode {image.mode}, not the number of a class"
        raise UserError(what, name(), "a PNG of 8 bits without colours, or with a palette")
    with _pixel_budget.reserve(image.height * image.width), _named_errors(name):
        whole: Image = image
        if box is not None:
            edges = box.left, box.top, box.left + box.width, box.top + box.height
            whole = image.resize(shape[::-1], Resampling.NEAREST, edges)
        return np.array(whole, np.uint8).reshape(shape)


def _turned(image: Image, orientation: int) -> Image:
    """Turns the image upright by its EXIF orientation."""
    from PIL.Image import Transpose

    if orientation == 1:
        return image
    return image.transpose(
        {
            2: Transpose.FLIP_LEFT_RIGHT,
            3: Transpose.ROTATE_180,
            4: Transpose.FLIP_TOP_BOTTOM,
            5: Transpose.TRANSPOSE,
            6: Transpose.ROTATE_270,
            7: Transpose.TRANSVERSE,
            8: Transpose.ROTATE_90,
        }[orientation]
    )


def _resized(image: Image, shape: tuple[int, ...], box: CropBox | None, scale: int) -> bytes:
    """Resizes an image; `box` refers to an image with `scale` times its height and width."""
    from PIL.Image import Resampling

    height, width, channels = shape
    converted = image if image.mode == _MODES[channels] else image.convert(_MODES[channels])
    if box is not None:  # cut out and resized in one step
        edges = box.left, box.top, box.left + box.width, box.top + box.height
        left, top, right, bottom = (edge / scale for edge in edges)
        converted = converted.resize(
            (width, height), Resampling.BILINEAR, (left, top, right, bottom)
        )
    return converted.tobytes()


def _usual_jpeg(content: bytes) -> JpegHeader | None:
    """Returns the header of a common JPEG file; None for any other file or one that would cost too
    much, which PIL.Image.open() handles."""
    header = read_header(content)
    if header is None or header.height * header.width > _MOST_PIXELS:
        return None
    return header if header.has_one_scan or _scans(content) <= _MOST_SCANS else None


def _scans(content: bytes) -> int:
    """Counts the scans of a JPEG file and its thumbnail. Reads all of it: 2 % of the time that
    decoding takes."""
    return content.count(b"\xff\xda")


def _open(content: bytes, name: Name) -> ImageFile:
    """Returns a PIL image that is not decoded yet. Raises UserError."""
    import PIL.Image

    with _named_errors(name):
        image = PIL.Image.open(io.BytesIO(content), formats=_FORMATS)
        _check_cost(image, content, name)
        return image


@contextmanager
def _named_errors(name: Name) -> Iterator[None]:
    """Converts any exception that PIL raises for a broken file to a UserError that names the
    file."""
    import PIL.Image

    try:
        yield
    except UserError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _too_large(name(), str(error)) from error
    except (
        PIL.UnidentifiedImageError
    ) as error:  # PIL's message contains a memory address, which differs between ranks
        raise _unreadable(
            type(error)("neither JPEG nor PNG, BMP, WebP, TIFF, GIF, PPM"), name()
        ) from error
    except (
        Exception
    ) as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise _unreadable(error, name()) from error


def _check_cost(image: ImageFile, content: bytes, name: Name) -> None:
    """Raises UserError for an image that takes far more memory or time than the size of its file
    suggests."""
    pixels = image.width * image.height
    if pixels > _MOST_PIXELS:
        raise _too_large(
            name(), f"Image size ({pixels} pixels) exceeds limit of {_MOST_PIXELS} pixels"
        )
    if image.format in ("JPEG", "MPO") and (scans := _scans(content)) > _MOST_SCANS:
        raise UserError(
            f"the image has {scans} scans, at most {_MOST_SCANS}",
            name(),
            "save it again with another program",
        )
    if image.tile and image.tile[0][0] == "bmp_rle":  # PIL decodes it byte by byte: 10 s for 7 kB
        raise UserError(
            "the image is a BMP file with run-length encoding", name(), "convert it to PNG"
        )
    if image.tile and image.tile[0][0] == "ppm_plain":  # as slow: the numbers are text
        raise UserError("the image is a PPM file of decimal numbers", name(), "convert it to PNG")


def _too_large(name: str, what: str) -> UserError:
    return UserError(
        f"the image is too large to be decoded safely: {what}",
        name,
        "make it smaller, or remove it",
    )


def _unreadable(error: Exception, name: str) -> UserError:
    return UserError(
        f"the image cannot be read: {type(error).__name__}: {error}",
        name,
        "repair or remove the file",
    )


_SEGMENT = Struct(">BBH")  # 255, marker, length
_FRAME = Struct(">BHHB")  # bits, height, width, channels
_PROGRESSIVE = 0xC2
_SCAN = 0xDA
_FRAMES = (0xC0, 0xC1, _PROGRESSIVE)  # baseline, extended
# segments before frame and scan: application data, tables, restarts, comments
_OTHERS = (
    *range(0xE0, 0xF0),
    0xC4,
    0xDB,
    0xDD,
    0xFE,
)
_MODES = {1: "L", 3: "RGB"}
_SCALES = (8, 4, 2)  # the decoder skips the high frequencies and their cost


class JpegHeader(NamedTuple):
    height: int
    width: int
    mode: str  # PIL's mode: L or RGB
    has_one_scan: bool  # the decoder makes one pass over the pixels and rejects a second scan


def read_header(content: bytes) -> JpegHeader | None:
    """Returns the header of a JPEG file with 1 or 3 channels of 8 bits; None for any other or
    unusual file."""
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
    """Returns where the first segment with one of these markers begins, from `at` on; None if an
    uncommon segment comes before it."""
    while at + _SEGMENT.size + _FRAME.size <= len(content):
        prefix, marker, length = _SEGMENT.unpack_from(content, at)
        if prefix == 0xFF and marker in markers:
            return at
        if prefix != 0xFF or marker not in _OTHERS or length < 2:
            return None
        at += 2 + length
    return None


def decode_jpeg(content: bytes, header: JpegHeader, scale: int) -> Image:
    """Decodes the whole image at 1 / scale of its height and width, rounded up. Raises ValueError
    if it is damaged or truncated."""
    from PIL.Image import frombytes

    size = -(-header.width // scale), -(-header.height // scale)
    return frombytes(header.mode, size, content, "jpeg", header.mode, "", scale, 0)


def coarsest_scale(box: tuple[float, float], wanted: tuple[int, ...]) -> int:
    """Returns the coarsest scale for decode_jpeg() at which the box (height, width) still has the
    `wanted` pixels."""
    return next(
        (scale for scale in _SCALES if box[0] >= scale * wanted[0] and box[1] >= scale * wanted[1]),
        1,
    )
