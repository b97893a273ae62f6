"""Draws maps of a regression, the model's maps and their difference as one picture."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hvdtrain.data.grid import Grid
from hvdtrain.extras.maps.shown_masks import GAP, LINE, NO_CLASS, PAPER, TILE, sized, with_text

MOST_CHANNELS = 3
_MARGIN = 8  # pixels
_BAR = 10  # pixels of the height of the bars of colours
_LEAST_WIDTH = 380  # pixels, for the titles
_COLUMNS = ("truth", "prediction", "prediction - truth")
# dark to light, as of matplotlib's viridis, at equal distances
_VALUES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
# below and above 0
_DIFFERENCES = ((33, 102, 172), (146, 197, 222), (247, 247, 247), (244, 165, 130), (178, 24, 43))


class MapSamples(NamedTuple):
    """Maps of samples, with predictions."""

    numbers: np.ndarray  # int64 (n,), of the samples in their set
    true: np.ndarray  # (n, C, H, W); NaN: no value
    said: np.ndarray  # (n, C, H, W)
    names: tuple[str, ...]  # of the channels


def part_of_maps(maps: np.ndarray) -> np.ndarray:
    """Returns what a picture shows of maps (n, C, H, W), float64: the first channels, and of large
    maps every second point, or fewer."""
    step = max(1, -(-max(maps.shape[2:]) // (2 * TILE)))
    return maps[:, :MOST_CHANNELS, ::step, ::step].astype(np.float64)


def begins_in_the_south(grid: Grid | None) -> bool:
    """Whether the rows of maps go from south to north, by a coordinate in degrees north along an
    axis before that in degrees east."""
    axes = {}
    for one in grid.coordinates if grid else ():
        kind = f"{one.attributes.get('units', '')}".rpartition("_")[2]
        if kind in ("north", "east") and len(one.axes) == 1 and len(one.values) > 1:
            axes[kind] = one
    if grid is None or len(axes) < 2:
        return False
    north = axes["north"]
    rows_first = grid.axes.index(north.axes[0]) < grid.axes.index(axes["east"].axes[0])
    return rows_first and bool(north.values[0] < north.values[-1])


def picture_of_maps(maps: MapSamples) -> np.ndarray:
    """Returns uint8 (height, width, 3): for each sample and channel a row of the truth, the
    prediction and their difference."""
    tiles = []
    titles = []
    for number, true, said in zip(maps.numbers.tolist(), maps.true, maps.said, strict=True):
        for name, truth, prediction in zip(maps.names, true, said, strict=True):
            low, high = _range(truth)
            difference = prediction - truth
            most = float(np.nanmax(np.abs(difference), initial=0.0, where=~np.isnan(difference)))
            tiles.append(
                [
                    _coloured(truth, low, high, _VALUES),
                    _coloured(prediction, low, high, _VALUES),
                    _coloured(difference, -most, most, _DIFFERENCES),
                ]
            )
            titles.append(
                f"sample {number}, {name}: {low:.4g} to {high:.4g}, difference up to {most:.3g}"
            )
    return _page([sized(np.array(row)) for row in tiles], titles)


def _range(truth: np.ndarray) -> tuple[float, float]:
    known = truth[np.isfinite(truth)]
    return (float(known.min()), float(known.max())) if known.size else (0.0, 0.0)


def _coloured(
    values: np.ndarray, low: float, high: float, colours: tuple[tuple[int, int, int], ...]
) -> np.ndarray:
    """Returns uint8 (H, W, 3): colours from low to high; grey where there is no number."""
    shares = np.clip((values - low) / (high - low if high > low else 1.0), 0.0, 1.0)
    if high <= low:
        shares = np.where(np.isfinite(values), 0.5, np.nan)
    anchors = np.linspace(0.0, 1.0, len(colours))
    of_colours = zip(*colours, strict=True)
    known = np.where(np.isfinite(shares), shares, 0.0)
    pixels = np.stack([np.interp(known, anchors, of) for of in of_colours], -1)
    pixels[~np.isfinite(shares)] = NO_CLASS
    return np.rint(pixels).astype(np.uint8)


def _page(rows: list[np.ndarray], titles: list[str]) -> np.ndarray:
    """Puts rows of three tiles, uint8 (3, H, W, 3), below each other, each with its title; then the
    colours."""
    _, height, width, _ = rows[0].shape
    row_height = LINE + height + GAP
    column = max(width, _LEAST_WIDTH // 3) + GAP
    end = LINE + len(rows) * row_height
    shape = (end + _BAR + LINE, max(3 * column - GAP, _LEAST_WIDTH), 3)
    page = np.full(shape, PAPER, np.uint8)
    texts = [(number * column, 2, name) for number, name in enumerate(_COLUMNS)]
    for number, (tiles, title) in enumerate(zip(rows, titles, strict=True)):
        y = LINE + number * row_height
        texts.append((0, y + 2, title))
        for place, tile in enumerate(tiles):
            x = place * column
            page[y + LINE : y + LINE + height, x : x + width] = tile
    page[end : end + _BAR, : column + width] = _bar(column + width, _VALUES)
    page[end : end + _BAR, 2 * column : 2 * column + width] = _bar(width, _DIFFERENCES)
    texts += [(0, end + _BAR + 2, "lowest to highest truth")]
    texts += [(2 * column, end + _BAR + 2, "too low, too high")]
    margins = ((_MARGIN, _MARGIN), (_MARGIN, _MARGIN), (0, 0))
    return np.pad(with_text(page, texts), margins, constant_values=PAPER[0])


def _bar(width: int, colours: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    """Returns the colours from low to high, uint8 (_BAR, width, 3)."""
    return _coloured(np.tile(np.linspace(0.0, 1.0, width), (_BAR, 1)), 0.0, 1.0, colours)
