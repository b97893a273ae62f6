"""One encoded image -> pixels, in bounded memory and time; every defect is a UserError that names the image."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    from PIL.ImageFile import ImageFile

Name = Callable[[], str]  # the name of an image in messages: called only for an error, since an archive is searched for it
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MODES = {1: "L", 3: "RGB"}
_MOST_SIDE = 2**13  # pixels, of data.size
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # by content, whatever the suffix: some formats of PIL start other programs
MOST_BYTES = 2**27  # of an image file
_MOST_PIXELS = 2**26  # ImageNet's largest image has 61 million
_MOST_SCANS = 100  # of a JPEG file and its thumbnail. Encoders write 10; each is a pass over all pixels: 400 kB of scans take 80 s


class _PixelBudget:
    """Limits the pixels that all threads together decode at once; a pixel takes up to 11 bytes of memory."""

    def __init__(self, pixels: int) -> None:
        self._free = pixels
        self._changed = Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Waits until so many pixels are free."""
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
    """Raises UserError for a data.size or data.channels that no image can have."""
    if channels not in _MODES or (size is not None and not 1 <= size <= _MOST_SIDE):
        what = f"images of size {size} with {channels} channels are impossible"
        raise UserError(what, "data.size, data.channels", f"data.channels is 1 or 3, data.size is 1 to {_MOST_SIDE}")


def check_file(file: str | Path) -> os.stat_result:
    """The status of a regular file of at most MOST_BYTES: a pipe or a device may have no end. Raises UserError for any other, OSError."""
    status = os.stat(file)
    if not stat.S_ISREG(status.st_mode):
        raise UserError("the image is not a regular file", str(file), "remove it")
    if status.st_size > MOST_BYTES:
        raise UserError(f"the image is a file of {status.st_size} bytes, at most {MOST_BYTES}", str(file), "make it smaller, or remove it")
    return status


def read_file(file: str) -> bytes:
    """The bytes of an image file. Raises UserError. `file` is a string, since making a Path takes as long as reading the file."""
    try:
        size = check_file(file).st_size
        with open(file, "rb") as opened:
            return opened.read(size)
    except OSError as error:
        raise _unreadable(error, file) from error


def decode(content: bytes, name: Name, first: Name, shape: tuple[int, ...], crop: bool) -> bytes:
    """Pixels uint8 of `shape`, (H, W, C), row by row. With `crop` the image's centre square is resized, else its size must be H x W.

    Safe to call from several threads; PIL releases the interpreter lock. Raises UserError, where sizes differ with the name of the `first`
    image, which H and W were read from.
    """
    from PIL.Image import Resampling

    height, width, channels = shape
    with _opened(content, name) as image:
        if image.mode.startswith("I"):
            raise UserError(f"the image has more than 8 bits a channel (mode {image.mode})", name(), "convert it to 8 bits a channel")
        if not crop and (image.height, image.width) != (height, width):
            raise UserError(
                f"the images differ in size: {width} x {height} and {image.width} x {image.height} pixels",
                f"{first()} and {name()}",
                f"data.size={min(height, width)} resizes the centre square of every image to that size",
            )
        with _pixel_budget.reserve(image.width * image.height):
            converted = image if image.mode == _MODES[channels] else image.convert(_MODES[channels])
            if crop:  # the centre square and its resizing in one step
                side = min(converted.size)
                left, top = (converted.width - side) / 2, (converted.height - side) / 2
                converted = converted.resize((width, height), Resampling.BILINEAR, (left, top, left + side, top + side))
            return converted.tobytes()


def height_and_width(content: bytes, name: Name) -> tuple[int, int]:
    """Of an image, from its header alone. Raises UserError."""
    with _opened(content, name) as image:
        return image.height, image.width


@contextmanager
def _opened(content: bytes, name: Name) -> Iterator[ImageFile]:
    """A PIL image, not decoded yet. Whatever PIL raises for a broken file becomes a UserError that names the file."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_cost(image, content, name)
            yield image
    except UserError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _too_large(name(), str(error)) from error
    except PIL.UnidentifiedImageError as error:  # its own message holds a memory address, which differs between ranks
        raise _unreadable(type(error)("neither JPEG nor PNG, BMP, WebP"), name()) from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise _unreadable(error, name()) from error


def _check_cost(image: ImageFile, content: bytes, name: Name) -> None:
    """Raises UserError for an image that takes far more memory or time than the size of its file suggests."""
    pixels = image.width * image.height
    if pixels > _MOST_PIXELS:
        raise _too_large(name(), f"Image size ({pixels} pixels) exceeds limit of {_MOST_PIXELS} pixels")
    if image.format in ("JPEG", "MPO") and (scans := content.count(b"\xff\xda")) > _MOST_SCANS:
        raise UserError(f"the image has {scans} scans, at most {_MOST_SCANS}", name(), "save it again with another program")
    if image.tile and image.tile[0][0] == "bmp_rle":  # PIL decodes it byte by byte: 10 s for 7 kB
        raise UserError("the image is a BMP file with run-length encoding", name(), "convert it to PNG")


def _too_large(name: str, what: str) -> UserError:
    return UserError(f"the image is too large to be decoded safely: {what}", name, "make it smaller, or remove it")


def _unreadable(error: Exception, name: str) -> UserError:
    return UserError(f"the image cannot be read: {type(error).__name__}: {error}", name, "repair or remove the file")
