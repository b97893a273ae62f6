"""The codebook of image tokens: few colours for all of a data set, which k-means finds; the nearest
one of a pixel; and its file in a run folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvdtrain.core.arrays import digest
from hvdtrain.core.folder import Folder
from hvdtrain.core.progress import fold
from hvdtrain.data.channel_stats import Images
from hvdtrain.data.option_error import OptionError
from hvdtrain.errors import UserError

MOST_COLOURS = 2**15
_PIXELS = 2**16  # number of pixels to draw: 1.3 for each image of CIFAR-10
_ROUNDS = 20  # most rounds of k-means: then the squared error falls by less than 0.1 % per round
_BLOCK_VALUES = 2**22  # distances computed at a time, 16 MB
_DRAWN = 0x706978  # a stream of counters
_UNKNOWN = 2**16 - 1  # entry in the table of colours that was not looked up yet


@dataclass(frozen=True, eq=False)
class Codebook:
    """Colours in rising order, of one channel or three."""

    colours: np.ndarray  # uint8 (k, C)

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the colours of integer tokens (...), each below k, as uint8 (..., C)."""
        return self.colours[tokens]

    @property
    def values(self) -> int:
        """The number of colours."""
        return len(self.colours)

    def digest(self) -> str:
        """Returns a 64-bit digest, as 16 hex digits."""
        return digest({"colours": self.colours})


class Encoder:
    """Finds the nearest colour of pixels. Each colour is searched once and then kept in a table, 32
    MB for three channels."""

    def __init__(self, codebook: Codebook) -> None:
        self._colours = codebook.colours
        self._table = np.full(256 ** codebook.colours.shape[1], _UNKNOWN, np.uint16)

    def encode(self, pixels: np.ndarray) -> np.ndarray:
        """Encodes uint8 (..., C) as uint16 (...), exactly; in a tie, the first colour is used."""
        numbers = _as_numbers(pixels)
        seen = self._table[numbers] != _UNKNOWN
        if not seen.all():
            new = np.unique(numbers[~seen])
            self._table[new] = nearest(_as_colours(new, pixels.shape[-1]), self._colours)
        return self._table[numbers]


def make_codebook(images: Images, colours: int, side: int) -> Codebook:
    """Computes k-means over pixels that counters draw. The result is the same in every run and on
    every machine, because all arithmetic uses integers.

    The images are reduced to `side` pixels first. Raises UserError if the pixels have fewer colours
    than requested.
    """
    found = k_means(draw_pixels(images, side), colours)
    return Codebook(found[np.lexsort(found.T[::-1])])


def draw_pixels(images: Images, side: int) -> np.ndarray:
    """Draws 65,536 pixels, or fewer from large images, of any images and positions, uint8 (n, C),
    in the order of the draws."""
    height, width, channels = images.shape
    draws = np.arange(_PIXELS, dtype=np.uint64)
    samples = (fold(_DRAWN, 0, draws) % np.uint64(len(images))).astype(np.int64)
    places = (fold(_DRAWN, 1, draws) % np.uint64(side * side)).astype(np.int64)
    pixels = np.empty((_PIXELS, channels), np.uint8)
    order = np.argsort(samples, kind="stable")
    wanted = np.unique(samples)
    block = max(1, _BLOCK_VALUES // (height * width * channels))
    for start in range(0, len(wanted), block):
        of_block = wanted[start : start + block]
        x = reduce_images(images.read(of_block)["x"], side).reshape(len(of_block), -1, channels)
        first, last = np.searchsorted(samples[order], [of_block[0], of_block[-1] + 1])
        rows = order[first:last]
        pixels[rows] = x[np.searchsorted(of_block, samples[rows]), places[rows]]
    return pixels


def reduce_images(x: np.ndarray, side: int) -> np.ndarray:
    """Reduces uint8 (n, H, W, C) to uint8 (n, side, side, C): each pixel is the rounded mean of a
    square; `side` divides H = W."""
    n, height, _, channels = x.shape
    factor = height // side
    if factor == 1:
        return x
    squares = x.reshape(n, side, factor, side, factor, channels).sum((2, 4), dtype=np.uint32)
    return ((2 * squares + factor * factor) // (2 * factor * factor)).astype(np.uint8)


def k_means(pixels: np.ndarray, colours: int) -> np.ndarray:
    """Runs Lloyd's algorithm (1982, "Least squares quantization in PCM") on uint8 (n, C), starting
    with its first distinct colours; returns uint8 (colours, C).

    Means are rounded to integers. A colour without pixels is replaced by the pixel that is farthest
    from its colour. Raises UserError if the pixels have fewer colours.
    """
    channels = pixels.shape[1]
    numbers, firsts, counts = np.unique(_as_numbers(pixels), return_index=True, return_counts=True)
    if len(numbers) < colours:
        what = f"the pixels have {len(numbers)} colours; data.colours={colours} asks for more"
        raise OptionError(what, "colours", f"data.colours={len(numbers)} or less")
    points = _as_colours(numbers, channels)  # different ones, each `counts` times
    centres = pixels[np.sort(firsts)[:colours]]
    for _ in range(_ROUNDS):
        own = nearest(points, centres)
        # sums of integers below 2**53 are exact
        members = np.bincount(own, counts, minlength=colours).astype(np.int64)
        sums = np.stack(
            [
                np.bincount(own, counts * points[:, c].astype(np.int64), minlength=colours)
                for c in range(channels)
            ],
            1,
        )
        means = (2 * sums.astype(np.int64) + members[:, None]) // np.maximum(2 * members, 1)[
            :, None
        ]
        unused = np.flatnonzero(members == 0)
        errors = np.square(points.astype(np.int64) - centres[own]).sum(1) * counts
        means[unused] = points[np.argsort(-errors, kind="stable")[: len(unused)]]
        if np.array_equal(means, centres):
            break
        centres = means.astype(np.uint8)
    return centres


def nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Returns the centre nearest to each point, the first in a tie: uint8 (n, C), uint8 (k, C) ->
    int64 (n,).

    It uses |p - c|^2 - |p|^2 = |c|^2 - 2 p c: integers below 2**24, which are exact in float32, in
    any order of summation.
    """
    c = centres.astype(np.float32)
    squares = np.square(c).sum(1)
    block = max(1, _BLOCK_VALUES // len(c))
    numbers = np.empty(len(points), np.int64)
    for start in range(0, len(points), block):
        p = points[start : start + block].astype(np.float32)
        numbers[start : start + block] = (squares - 2.0 * (p @ c.T)).argmin(1)
    return numbers


def _as_numbers(pixels: np.ndarray) -> np.ndarray:
    """Converts uint8 (..., C) to int32 (...): 65,536 r + 256 g + b, or the grey value."""
    numbers = np.zeros(pixels.shape[:-1], np.int32)
    for channel in range(pixels.shape[-1]):
        numbers = numbers << 8 | pixels[..., channel]
    return numbers


def _as_colours(numbers: np.ndarray, channels: int) -> np.ndarray:
    """Converts int32 (n,) to uint8 (n, C), the inverse of _as_numbers()."""
    return np.stack(
        [
            (numbers >> 8 * (channels - 1 - channel) & 255).astype(np.uint8)
            for channel in range(channels)
        ],
        1,
    )


FILE = "codebook.json"  # in a run folder
MOST_FILE_BYTES = 2**21  # limit for that file


def to_json(codebook: Codebook) -> bytes:
    """Returns the content of the file in a run folder: {"colours": [[255, 0, 0], ...]}."""
    return json.dumps({"colours": codebook.colours.tolist()}).encode() + b"\n"


def read_codebook(run: Path) -> Codebook:
    """Reads a run's codebook. Raises UserError if the file is absent or damaged."""
    try:
        with Folder.open(run) as folder:
            content = folder.read(FILE, MOST_FILE_BYTES)
    except OSError as error:
        what = f"the codebook cannot be read: {error.strerror or error}"
        raise UserError(
            what, str(run / FILE), "restore it from a copy; without it, colours are unknown"
        ) from None
    return from_json(content, str(run / FILE))


def from_json(content: bytes, where: str) -> Codebook:
    """Reads a codebook from a file's content. Raises UserError if the file is damaged."""
    try:
        colours = np.array(json.loads(content)["colours"])
        if (
            colours.dtype.kind != "i"
            or colours.ndim != 2
            or colours.shape[1] not in (1, 3)
            or not 2 <= len(colours) <= MOST_COLOURS
        ):
            raise ValueError(f"{colours.dtype} {colours.shape}")
        if colours.min() < 0 or colours.max() > 255:
            raise ValueError("values outside of 0 to 255")
    except (ValueError, TypeError, LookupError, RecursionError, OverflowError) as error:
        what = f"the codebook is damaged: {type(error).__name__}: {error}"
        raise UserError(
            what, where, "restore it from a copy; without it, colours are unknown"
        ) from None
    return Codebook(colours.astype(np.uint8))
