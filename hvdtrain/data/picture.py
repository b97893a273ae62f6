"""One image file -> pixels, in bounded memory and time; every defect is named."""

from __future__ import annotations

import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING

from hvdtrain.errors import UserError

if TYPE_CHECKING:
    import os

    from PIL.ImageFile import ImageFile

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")
MODES = {1: "L", 3: "RGB"}
MOST_SIDE = 2**13  # pixels that an image may be brought to
_FORMATS = ("JPEG", "PNG", "BMP", "WEBP")  # by content: PIL knows formats that start other programs
_MOST_BYTES = 2**27  # of a file
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


def check_file(file: Path) -> os.stat_result:
    """What the system says of a file that may be opened and read whole: a pipe or a device may have no end. Raises OSError too."""
    found = file.stat()
    if not stat.S_ISREG(found.st_mode):
        raise UserError("the image is not a regular file", str(file), "remove it")
    if found.st_size > _MOST_BYTES:
        raise UserError(f"the image is a file of {found.st_size} bytes, at most {_MOST_BYTES}", str(file), "make it smaller, or remove it")
    return found


def decode(file: Path, first: Path, shape: tuple[int, ...], crop: bool) -> bytes:
    """Pixels (H, W, C) of one image, row by row: its centre square where `crop`, else it has to have the size of the image `first`."""
    from PIL.Image import Resampling

    height, width, channels = shape
    with _opened(file) as image:
        if image.mode.startswith("I"):
            raise UserError(f"the image has more than 8 bits a channel (mode {image.mode})", str(file), "convert it")
        if not crop and (image.height, image.width) != (height, width):
            raise UserError(
                f"the images differ in size: {width} x {height} and {image.width} x {image.height} pixels",
                f"{first} and {file}",
                f"data.size={min(height, width)} brings all to a centre square of that size",
            )
        with _room.take(image.width * image.height):
            picture = image if image.mode == MODES[channels] else image.convert(MODES[channels])
            if crop:  # the shorter side to the size and a centre crop, in one
                side = min(picture.size)
                left, top = (picture.width - side) / 2, (picture.height - side) / 2
                picture = picture.resize((width, height), Resampling.BILINEAR, (left, top, left + side, top + side))
            return picture.tobytes()


def extent(file: Path) -> tuple[int, int]:
    """Height and width of an image, from its header alone."""
    with bombs_refused(), _opened(file) as image:
        return image.height, image.width


@contextmanager
def bombs_refused() -> Iterator[None]:
    """PIL only warns of an image between one and two times its limit of pixels. For all threads: to be entered by one."""
    from PIL.Image import DecompressionBombWarning

    with warnings.catch_warnings():
        warnings.simplefilter("error", DecompressionBombWarning)
        yield


@contextmanager
def _opened(file: Path) -> Iterator[ImageFile]:
    """A PIL image, not decoded yet; whatever a broken file makes PIL raise is a UserError that names the file."""
    import PIL.Image

    try:
        check_file(file)
        with PIL.Image.open(file, formats=_FORMATS) as image:
            _check_cost(image, file)
            yield image
    except UserError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _too_large(file, str(error)) from error
    except Exception as error:  # decoders raise OSError, SyntaxError, ValueError, struct.error and more
        raise UserError(f"the image cannot be read: {type(error).__name__}: {error}", str(file), "mend or remove the file") from error


def _check_cost(image: ImageFile, file: Path) -> None:
    """Refuses an image that needs much more memory or time than its file's size tells."""
    pixels = image.width * image.height
    if pixels > _MOST_PIXELS:
        raise _too_large(file, f"Image size ({pixels} pixels) exceeds limit of {_MOST_PIXELS} pixels")
    if image.format in ("JPEG", "MPO") and (scans := file.read_bytes().count(b"\xff\xda")) > _MOST_SCANS:
        raise UserError(f"the image has {scans} scans, at most {_MOST_SCANS}", str(file), "write it anew with another program")
    if image.tile and image.tile[0][0] == "bmp_rle":  # PIL decodes it byte by byte: 10 s for 7 kB
        raise UserError("the image is a BMP file with run-length encoding", str(file), "convert it to PNG")


def _too_large(file: Path, what: str) -> UserError:
    return UserError(f"the image is too large to be decoded safely: {what}", str(file), "make it smaller, or remove it")
