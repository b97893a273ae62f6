"""Draws images, their masks and a model's predictions as one picture, and chooses the colours of
classes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

TILE = 192  # pixels of the longer side of an image in the picture, about
GAP = 6
LINE = 20  # pixels of a line of text
_FONT = 13
_SWATCH = 12
_MOST_NAMED = 40  # classes in the legend
_COLUMNS = ("image", "mask", "prediction")
NO_CLASS = (205, 205, 205)
_INK = (30, 30, 30)
PAPER = (255, 255, 255)


def palette() -> np.ndarray:
    """Returns the colours of classes, uint8 (256, 3): the bits of a class number are spread over
    red, green and blue, as in PASCAL VOC."""
    colours = np.zeros((256, 3), np.uint8)
    for bit in range(8):
        for channel in range(3):
            colours[:, channel] |= (
                ((np.arange(256) >> (3 * bit + channel)) & 1) << (7 - bit)
            ).astype(np.uint8)
    return colours


class Masks(NamedTuple):
    """Samples of a data set of masks, with predictions."""

    numbers: np.ndarray  # int64 (n,), of the samples in their set
    images: np.ndarray  # uint8 (n, H, W, C), or floats (n, C, H, W)
    true: np.ndarray  # integers (n, H, W)
    said: np.ndarray  # integers (n, H, W)
    ignored: int | None  # the number of pixels without a class


def picture(masks: Masks) -> np.ndarray:
    """Returns uint8 (height, width, 3): for each sample a row with its image, mask and prediction,
    and the colours of the classes below."""
    tiles = [
        sized(tile)
        for tile in (
            _as_rgb(masks.images),
            _coloured(masks.true, masks.ignored),
            _coloured(masks.said, None),
        )
    ]
    n, height, width = tiles[0].shape[:3]
    row_height = LINE + height + GAP
    width_and_gap = width + GAP
    legend = _legend(masks, 3 * width_and_gap - GAP)
    page = np.full((LINE + n * row_height + len(legend), legend.shape[1], 3), PAPER, np.uint8)
    page[len(page) - len(legend) :] = legend
    texts = [(column * width_and_gap, 2, name) for column, name in enumerate(_COLUMNS)]
    for row, title in enumerate(_titles(masks)):
        y = LINE + row * row_height
        texts.append((0, y + 2, title))
        for column, tile in enumerate(tiles):
            x = column * width_and_gap
            page[y + LINE : y + LINE + height, x : x + width] = tile[row]
    return with_text(page, texts)


def _titles(masks: Masks) -> list[str]:
    known = _known(masks).sum((1, 2))
    right = (_known(masks) & (masks.true == masks.said)).sum((1, 2))
    shares = [
        f": {100 * part / whole:.1f}% of its pixels right" if whole else ""
        for part, whole in zip(right, known, strict=True)
    ]
    return [f"sample {number}{share}" for number, share in zip(masks.numbers, shares, strict=True)]


def _known(masks: Masks) -> np.ndarray:
    """Returns bool (n, H, W): the pixels that have a class."""
    return np.ones(masks.true.shape, bool) if masks.ignored is None else masks.true != masks.ignored


def _as_rgb(images: np.ndarray) -> np.ndarray:
    """Returns Returns the colours of classes, uint8 (n, H, W, 3).. Uses one or three channels, else
    only the first; floats are scaled to each channel's range."""
    if images.dtype != np.uint8:
        images = images[:, :3] if images.shape[1] == 3 else images[:, :1]
        finite = np.where(np.isfinite(images), images, 0.0).astype(np.float64)
        low = finite.min((0, 2, 3), keepdims=True)
        high = finite.max((0, 2, 3), keepdims=True)
        scaled = (finite - low) / np.where(high > low, high - low, 1.0)
        images = np.rint(255.0 * scaled).astype(np.uint8).transpose(0, 2, 3, 1)
    if images.shape[3] != 3:
        images = images[..., :1].repeat(3, 3)
    return images


def _coloured(classes: np.ndarray, ignored: int | None) -> np.ndarray:
    """Returns the colours of classes, uint8 (n, H, W, 3)."""
    pixels = palette()[classes.astype(np.int64) % 256]
    if ignored is not None:
        pixels[classes == ignored] = NO_CLASS
    return pixels


def sized(tiles: np.ndarray) -> np.ndarray:
    """Resizes to uint8 (n, h, w, 3), about TILE pixels wide: repeats or skips pixels."""
    longest = max(tiles.shape[1:3])
    if longest < TILE:
        factor = TILE // longest
        return tiles.repeat(factor, 1).repeat(factor, 2)
    step = -(-longest // (2 * TILE))
    return tiles[:, ::step, ::step]


def _legend(masks: Masks, width: int) -> np.ndarray:
    """Returns uint8 (h, width, 3): the colour and number of each class in the picture."""
    is_known = _known(masks)
    classes = np.union1d(masks.true[is_known], masks.said).tolist()
    entries = [
        (tuple(palette()[number % 256].tolist()), f"class {number}")
        for number in classes[:_MOST_NAMED]
    ]
    if len(classes) > _MOST_NAMED:
        entries.append((PAPER, f"and {len(classes) - _MOST_NAMED} more"))
    if not is_known.all():
        entries.append((NO_CLASS, "no class"))
    places = []
    x = 0
    y = 2
    for colour, name in entries:
        taken = _SWATCH + 6 + _text_width(name) + 14
        if x and x + taken > width:
            x = 0
            y = y + LINE
        places.append((x, y, colour, name))
        x += taken
    page = np.full((y + LINE, width, 3), PAPER, np.uint8)
    for x, y, colour, _ in places:
        page[y + 2 : y + 2 + _SWATCH, x : x + _SWATCH] = colour
    return with_text(page, [(x + _SWATCH + 6, y, name) for x, y, _, name in places])


def _text_width(text: str) -> int:
    import PIL.ImageFont

    return round(PIL.ImageFont.load_default(_FONT).getbbox(text)[2])


def with_text(page: np.ndarray, texts: list[tuple[int, int, str]]) -> np.ndarray:
    import PIL.Image
    import PIL.ImageDraw
    import PIL.ImageFont

    image = PIL.Image.fromarray(page)
    draw = PIL.ImageDraw.Draw(image)
    for x, y, text in texts:
        draw.text((x, y), text, fill=_INK, font=PIL.ImageFont.load_default(_FONT))
    return np.asarray(image)
