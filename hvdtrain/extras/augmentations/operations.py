"""Operations of RandAugment and colour jitter on batches of images. Each image has its own
operations; equal operations are computed together.

All pixels are computed in integers, so NumPy and torch give the same bytes on any device, whatever
else is in the batch. Each operation matches torchvision's uint8 function of the same name: bit by
bit, or within one grey level if torchvision computes in float32. If a shear or rotation ends
halfway between two pixels, torchvision may take the other one.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import Any, Protocol

import numpy as np


class Operation(IntEnum):
    """The operations; each has one argument, described in the comment."""

    IDENTITY = 0
    SHEAR_X = 1  # pixels to the left for each pixel down
    SHEAR_Y = 2  # pixels up for each pixel to the right
    TRANSLATE_X = 3  # pixels to the right, rounded towards 0
    TRANSLATE_Y = 4  # pixels down, rounded towards 0
    ROTATE = 5  # degrees, counter-clockwise about the centre
    BRIGHTNESS = 6  # factor: 0 is black, 1 the image
    COLOR = 7  # factor: 0 is grey, 1 the image; an image of one channel stays as it is
    CONTRAST = 8  # factor: 0 is the mean grey, 1 the image
    SHARPNESS = 9  # factor: 0 is blurred, 1 the image
    POSTERIZE = 10  # number of bits to keep
    SOLARIZE = 11  # threshold, 0 ... 255: values at or above it are inverted
    AUTO_CONTRAST = 12  # -
    EQUALIZE = 13  # -
    HUE = 14  # turns of the colour circle: -1/2 ... 1/2; an image of one channel stays as it is


GEOMETRIC = (
    Operation.SHEAR_X,
    Operation.SHEAR_Y,
    Operation.TRANSLATE_X,
    Operation.TRANSLATE_Y,
    Operation.ROTATE,
)
_OF_TABLES = (
    *(Operation.BRIGHTNESS, Operation.CONTRAST, Operation.POSTERIZE),
    *(Operation.SOLARIZE, Operation.AUTO_CONTRAST, Operation.EQUALIZE),
)
_ONE = 2**16  # the factor 1
# 0.2989, 0.587, 0.114 of _ONE, as torchvision weighs red, green and blue
_GREY = (
    19589,
    38470,
    7471,
)
_FINE = 2**32  # the coordinate 1: rounding moves a pixel at the far end of a row of 2^14 by 2^-19


class Arrays(Protocol):
    """The array functions of one library on one device. Images are uint8 (m, H, W, C)."""

    @property
    def xp(self) -> Any:
        """numpy or torch."""

    @property
    def block(self) -> int:
        """The number of values to compute at a time; at least one image is."""

    def put(self, array: np.ndarray) -> Any:
        """Copies a host array to the device."""

    def cast(self, x: Any, dtype: str) -> Any:
        """Converts integers to another dtype, such as "int32"."""

    def take(self, x: Any, index: Any) -> Any:
        """Returns rows of x (P, ...) selected by integers of any shape."""

    def counts(self, index: Any, length: int) -> Any:
        """Counts how often each of 0 ... length - 1 occurs in the integers `index`, int64
        (length,)."""


class HostArrays:
    """The array functions of NumPy."""

    xp: Any = np
    block = 2**18  # 2 MB of indices

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def cast(self, x: np.ndarray, dtype: str) -> np.ndarray:
        return x.astype(dtype)

    def take(self, x: np.ndarray, index: np.ndarray) -> np.ndarray:
        return x.take(index, 0)

    def counts(self, index: np.ndarray, length: int) -> np.ndarray:
        return np.bincount(index.ravel(), minlength=length)


def apply_operations(x: Any, operations: np.ndarray, arguments: np.ndarray, arrays: Arrays) -> Any:
    """Applies operations int64 (n, K) with arguments float64 (n, K) to images uint8 (n, H, W, C),
    column by column.

    `x` is not changed.
    """
    result = x + 0
    at_once = max(1, arrays.block // math.prod(x.shape[1:]))
    for operation, argument in zip(operations.T, arguments.T, strict=True):
        kinds = _KIND[operation]
        for kind in np.unique(kinds[kinds > 0]):
            of_kind = np.flatnonzero(kinds == kind)
            function = _FUNCTIONS[kind - 1]
            for start in range(0, len(of_kind), at_once):
                rows = of_kind[start : start + at_once]
                index = arrays.put(rows)
                result[index] = function(result[index], operation[rows], argument[rows], arrays)
    return result


def moved_pixels(
    operation: np.ndarray, argument: np.ndarray, height: int, width: int, arrays: Arrays
) -> tuple[Any, Any]:
    """Returns the row and the column that each pixel of GEOMETRIC operations comes from, int32 (m,
    H, W); they may be outside the image.

    Uses the nearest pixel, as torchvision does by default; in a tie, the lower or right pixel.
    """
    matrix, centre = _matrices(operation, argument, height, width)
    down = 2 * np.arange(height)[:, None] + 1  # centres of pixels, in half pixels
    right = 2 * np.arange(width)[None, :] + 1
    column, row = (
        arrays.put(weight_x * (right - centre[:, :1, None]) + shift)  # (m, 1, W)
        + arrays.put(
            weight_y * (down - centre[:, 1:, None]) + centre[:, axis, None, None] * _FINE
        )  # (m, H, 1)
        for axis, (weight_x, weight_y, shift) in enumerate(
            matrix.transpose(1, 2, 0)[..., None, None]
        )
    )
    return arrays.cast(row >> 33, "int32"), arrays.cast(column >> 33, "int32")


def _matrices(
    operation: np.ndarray, argument: np.ndarray, height: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the matrices from positions in the result to positions in the image, int64 (m, 2, 3)
    in units of 1 / _FINE, for x and y; and the fixed point, in half pixels.

    The shift is in half pixels, too.
    """
    m = len(operation)
    matrix = np.tile(np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), (m, 1, 1))
    centre = np.zeros((m, 2), np.int64)
    turn = np.deg2rad(np.where(operation == Operation.ROTATE, argument, 0.0))
    whole = 2 * np.trunc(argument)
    matrix[:, 0, 1] = np.where(operation == Operation.SHEAR_X, argument, -np.sin(turn))
    matrix[:, 1, 0] = np.where(operation == Operation.SHEAR_Y, argument, np.sin(turn))
    matrix[:, 0, 0] = matrix[:, 1, 1] = np.cos(turn)
    matrix[:, 0, 2] = np.where(operation == Operation.TRANSLATE_X, -whole, 0.0)
    matrix[:, 1, 2] = np.where(operation == Operation.TRANSLATE_Y, -whole, 0.0)
    centre[operation == Operation.ROTATE] = width, height
    return np.rint(matrix * _FINE).astype(np.int64), centre


def _moved(x: Any, operation: np.ndarray, argument: np.ndarray, arrays: Arrays) -> Any:
    m, height, width, channels = x.shape
    row, column = moved_pixels(operation, argument, height, width, arrays)
    near_row = row.clip(0, height - 1)
    near_column = column.clip(0, width - 1)
    first = arrays.put(
        (height * width * np.arange(m)[:, None, None]).astype(
            np.int32 if m * height * width < 2**31 else np.int64
        )
    )
    pixels = x.reshape(-1, channels)
    place = arrays.xp.where(
        (near_row == row) & (near_column == column),
        first + near_row * width + near_column,
        len(pixels),
    )
    # the last one is black
    return arrays.take(arrays.xp.concatenate([pixels, pixels[:1] * 0]), place)


def _by_tables(x: Any, operation: np.ndarray, argument: np.ndarray, arrays: Arrays) -> Any:
    """Maps the values of each channel by a table of 256 entries for each channel of each image."""
    channels = x.shape[-1]
    # uint8 (m, C, 256)
    tables = arrays.put(np.tile(_given_tables(operation, argument)[:, None], (1, channels, 1)))
    for kind, function in (
        (Operation.CONTRAST, _contrast),
        (Operation.AUTO_CONTRAST, _auto_contrast),
        (Operation.EQUALIZE, _equalize),
    ):
        rows = np.flatnonzero(operation == kind)
        if len(rows):
            index = arrays.put(rows)
            tables[index] = arrays.cast(
                function(x[index], argument[rows], arrays).clip(0, 255), "uint8"
            )
    return arrays.take(tables.reshape(-1), _table_places(x, arrays)).reshape(x.shape)


def _table_places(x: Any, arrays: Arrays) -> Any:
    """Returns the index of each value in concatenated tables of 256, one for each channel of each
    image: int32 (m, H, W C)."""
    m, height, width, channels = x.shape
    first = 256 * np.arange(m * channels, dtype=np.int32).reshape(m, 1, channels)
    # rows: three channels are a slow loop
    return x.reshape(m, height, width * channels) + arrays.put(np.tile(first, (1, 1, width)))


def _given_tables(operation: np.ndarray, argument: np.ndarray) -> np.ndarray:
    """Returns the tables of operations that do not depend on the image, uint8 (m, 256)."""
    values = np.arange(256)
    tables = np.tile(values.astype(np.uint8), (len(operation), 1))
    bright = operation == Operation.BRIGHTNESS
    tables[bright] = (
        values.astype(np.float32) * argument[bright].astype(np.float32)[:, None]
    ).clip(0, 255)
    few = operation == Operation.POSTERIZE
    tables[few] &= (0xFF00 >> argument[few].astype(np.int64)).astype(np.uint8)[:, None]
    solar = operation == Operation.SOLARIZE
    tables[solar] = np.where(values >= argument[solar][:, None], 255 - values, values)
    return tables


def _contrast(x: Any, factor: np.ndarray, arrays: Arrays) -> Any:
    """Returns tables that scale the distance from the mean grey value by a factor, int64 (m, C,
    256)."""
    m, height, width, channels = x.shape
    total = arrays.cast(_grey(_planes(x, arrays)), "int64").reshape(m, -1).sum(1)[:, None]  # (m, 1)
    fixed = arrays.put(_fixed(factor)[:, None])
    values = arrays.put(np.arange(256)[None])
    pixels = height * width
    table = (fixed * values * pixels + (_ONE - fixed) * total) // (_ONE * pixels)
    return table[:, None] + arrays.put(np.zeros((1, channels, 1), np.int64))


def _auto_contrast(x: Any, _: np.ndarray, arrays: Arrays) -> Any:
    """Maps the darkest value of a channel to 0 and the brightest to 255; a constant channel is not
    changed."""
    xp = arrays.xp
    values = arrays.put(np.arange(256))
    # (m, C, 1)
    low, high = (
        arrays.cast(limit(limit(x, 1), 1), "int64")[..., None] for limit in (xp.amin, xp.amax)
    )
    return xp.where(high > low, 255 * (values - low) // (high - low).clip(1), values)


def _equalize(x: Any, _: np.ndarray, arrays: Arrays) -> Any:
    """Equalizes the histogram of each channel, with Pillow's integer arithmetic, as in
    torchvision."""
    m, height, width, channels = x.shape
    counts = arrays.counts(_table_places(x, arrays), m * channels * 256).reshape(m, channels, 256)
    until = counts.cumsum(-1)
    # the brightest value that occurs
    most = arrays.xp.amax(arrays.xp.where(counts > 0, arrays.put(np.arange(256)), 0), -1)
    of_most = (counts * (arrays.put(np.arange(256)) == most[..., None])).sum(-1)[..., None]
    step = (height * width - of_most) // 255  # (m, C, 1)
    table = (until - counts + step // 2) // step.clip(1)
    return arrays.xp.where(step > 0, table, arrays.put(np.arange(256)))


def _color(x: Any, _: np.ndarray, factor: np.ndarray, arrays: Arrays) -> Any:
    if x.shape[-1] == 1:
        return x
    colours = _planes(x, arrays)
    grey = _grey(colours)
    fixed = arrays.put(_fixed(factor)[:, None, None].astype(np.int32))
    return arrays.xp.stack([_blend(colour, grey, fixed, arrays) for colour in colours], -1)


def _sharpness(x: Any, _: np.ndarray, factor: np.ndarray, arrays: Arrays) -> Any:
    """Blends with the image blurred by 3 x 3 pixels, with weight 5 in the middle and 1 elsewhere;
    its border stays as it is."""
    if min(x.shape[1:3]) <= 2:
        return x
    wide = arrays.cast(x, "int32")
    columns = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    middle = wide[:, 1:-1, 1:-1]
    blurred = (2 * (columns[:, :-2] + columns[:, 1:-1] + columns[:, 2:] + 4 * middle) + 13) // 26
    fixed = arrays.put(_fixed(factor)[:, None, None, None].astype(np.int32))
    wide[:, 1:-1, 1:-1] = arrays.cast(_blend(middle, blurred, fixed, arrays), "int32")
    return arrays.cast(wide, "uint8")


def _hue(x: Any, _: np.ndarray, turns: np.ndarray, arrays: Arrays) -> Any:
    """Rotates the hue of HSV (Smith 1978); value and saturation do not change."""
    if x.shape[-1] == 1:
        return x
    xp = arrays.xp
    red, green, blue = _planes(x, arrays)
    high = xp.maximum(xp.maximum(red, green), blue)
    low = xp.minimum(xp.minimum(red, green), blue)
    chroma = high - low
    is_red = high == red
    is_green = high == green
    across = xp.where(is_red, green - blue, xp.where(is_green, blue - red, red - green))
    # red at 0, green at 2, blue at 4; 6 are a turn
    sector = arrays.cast(~is_red, "int32") * (4 - 2 * arrays.cast(is_green, "int32"))
    turn = arrays.put(_fixed(6 * turns)[:, None, None].astype(np.int32))
    angle = (sector * _ONE + across * _ONE // chroma.clip(1) + turn) % (6 * _ONE)
    parts = (
        abs(angle - 3 * _ONE) - _ONE,
        2 * _ONE - abs(angle - 2 * _ONE),
        2 * _ONE - abs(angle - 4 * _ONE),
    )
    colours = [(low * _ONE + chroma * part.clip(0, _ONE) + _ONE // 2) >> 16 for part in parts]
    return arrays.cast(xp.stack(colours, -1), "uint8")


def _blend(x: Any, other: Any, fixed: Any, arrays: Arrays) -> Any:
    """Returns factor x + (1 - factor) other, rounded down to uint8; both are int32 of one shape.
    `fixed` is the factor as int32, from _fixed()."""
    return arrays.cast((((x - other) * fixed >> 16) + other).clip(0, 255), "uint8")


def _planes(x: Any, arrays: Arrays) -> list[Any]:
    """Returns the channels, int32 (m, H, W) each."""
    return [arrays.cast(x[..., channel], "int32") for channel in range(x.shape[-1])]


def _grey(planes: list[Any]) -> Any:
    """Returns the brightness of pixels with one or three channels, int32 (m, H, W), rounded
    down."""
    if len(planes) == 1:
        return planes[0]
    red, green, blue = (weight * plane for plane, weight in zip(planes, _GREY, strict=True))
    return (red + green + blue) >> 16


def _fixed(factor: np.ndarray) -> np.ndarray:
    return np.rint(factor * _ONE).astype(np.int64)


_FUNCTIONS = (_moved, _by_tables, _color, _sharpness, _hue)
# for each operation the number of its function, from 1; 0: none
_KIND = np.zeros(len(Operation), np.int64)
for _number, _operations in enumerate(
    (GEOMETRIC, _OF_TABLES, (Operation.COLOR,), (Operation.SHARPNESS,), (Operation.HUE,)), 1
):
    _KIND[list(_operations)] = _number


def is_geometric(operations: np.ndarray) -> np.ndarray:
    """Returns which operations, integers of any shape, are GEOMETRIC."""
    return (operations >= GEOMETRIC[0]) & (operations <= GEOMETRIC[-1])
