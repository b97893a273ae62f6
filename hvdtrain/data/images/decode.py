"""One encoded image -> pixels, in bounded memory and time; every defect is named."""

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

Where = Callable[[], str]  # an image's name in messages: an archive has to look for it
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
_MODES = {1: "L", 3: "RGB"}
_MOST_SIDE = 2**13  # pixels that an image may be brought to
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # by content: PIL knows formats that start other programs
MOST_BYTES = 2**27  # of a file
_MOST_PIXELS = 2**26  # ImageNet's largest image has 61 million
_MOST_SCANS = 100  # of a JPEG file, its thumbnail's included: encoders write 10. Each costs a pass over all pixels: 80 s for 400 kB of them


class _Room:
    """So many pixels, at most, are decoded at once by all threads together: up to 11 bytes of memory each."""

    def __init__(self, pixels: int) -> None:
        self._free, self._changed = pixels, Condition()

    @contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= pixels)
            self._free -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._free += pixels
                self._changed.notify_all()


_room = _Room(_MOST_PIXELS)


def check_look(size: int | None, channels: int) -> None:
    """Refuses options that no image can be brought to."""
    if channels not in _MODES or (size is not None and not 1 <= size <= _MOST_SIDE):
        what = f"images of size {size} with {channels} channels are impossible"
        raise UserError(what, "data.size, data.channels", f"data.channels is 1 or 3, data.size is 1 to {_MOST_SIDE}")


def check_file(file: str | Path) -> os.stat_result:
    """What the system says of a file that may be opened and read whole: a pipe or a device may have no end. Raises OSError too."""
    found = os.stat(file)
    if not stat.S_ISREG(found.st_mode):
        raise UserError("the image is not a regular file", str(file), "remove it")
    if found.st_size > MOST_BYTES:
        raise UserError(f"the image is a file of {found.st_size} bytes, at most {MOST_BYTES}", str(file), "make it smaller, or remove it")
    return found


def read_file(file: str) -> bytes:
    """The content of an image file, or a UserError that names it. A string: to make a Path of it takes as long as to read it."""
    try:
        size = check_file(file).st_size
        with open(file, "rb") as opened:
            return opened.read(size)
    except OSError as error:
        raise _unreadable(error, file) from error


def decode(content: bytes, where: Where, first: Where, shape: tuple[int, ...], crop: bool) -> bytes:
    """Pixels (H, W, C) of one image, row by row: its centre square where `crop`, else it has to have the size of the image `first`.

    Safe from several threads, and PIL lets them run side by side.
    """
    from PIL.Image import Resampling

    height, width, channels = shape
    with _opened(content, where) as image:
        if image.mode.startswith("I"):
            raise UserError(f"the image has more than 8 bits a channel (mode {image.mode})", where(), "convert it")
        if not crop and (image.height, image.width) != (height, width):
            raise UserError(
                f"the images differ in size: {width} x {height} and {image.width} x {image.height} pixels",
                f"{first()} and {where()}",
                f"data.size={min(height, width)} brings all to a centre square of that size",
            )
        with _room.take(image.width * image.height):
            picture = image if image.mode == _MODES[channels] else image.convert(_MODES[channels])
            if crop:  # the shorter side to the size and a centre crop, in one
                side = min(picture.size)
                left, top = (picture.width - side) / 2, (picture.height - side) / 2
                picture = picture.resize((width, height), Resampling.BILINEAR, (left, top, left + side, top + side))
            return picture.tobytes()


def extent(content: bytes, where: Where) -> tuple[int, int]:
    """Height and width of an image, from its header alone."""
    with _opened(content, where) as image:
        return image.height, image.width


@contextmanager
def _opened(content: bytes, where: Where) -> Iterator[ImageFile]:
    """A PIL image, not decoded yet; whatever a broken file makes PIL raise is a UserError that names the file."""
    import PIL.Image

    try:
        with PIL.Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            _check_cost(image, content, where)
            yield image
    except UserError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _too_large(where(), str(error)) from error
    except PIL.UnidentifiedImageError as error:  # its own words hold an address in memory, which no two ranks share
        raise _unreadable(type(error)("neither JPEG nor PNG, BMP, WebP"), where()) from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise _unreadable(error, where()) from error


def _check_cost(image: ImageFile, content: bytes, where: Where) -> None:
    """Refuses an image that needs much more memory or time than its file's size tells."""
    pixels = image.width * image.height
    if pixels > _MOST_PIXELS:
        raise _too_large(where(), f"Image size ({pixels} pixels) exceeds limit of {_MOST_PIXELS} pixels")
    if image.format in ("JPEG", "MPO") and (scans := content.count(b"\xff\xda")) > _MOST_SCANS:
        raise UserError(f"the image has {scans} scans, at most {_MOST_SCANS}", where(), "write it anew with another program")
    if image.tile and image.tile[0][0] == "bmp_rle":  # PIL decodes it byte by byte: 10 s for 7 kB
        raise UserError("the image is a BMP file with run-length encoding", where(), "convert it to PNG")


def _too_large(where: str, what: str) -> UserError:
    return UserError(f"the image is too large to be decoded safely: {what}", where, "make it smaller, or remove it")


def _unreadable(error: Exception, where: str) -> UserError:
    return UserError(f"the image cannot be read: {type(error).__name__}: {error}", where, "mend or remove the file")
