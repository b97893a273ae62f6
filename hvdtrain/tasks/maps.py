"""Maps: where samples x (C, H, W) or (H, W, C) and targets y of the same points have their
channels."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvdtrain.config import plugins
from hvdtrain.config.sections.model import ModelConfig
from hvdtrain.data.field import Channels, Field
from hvdtrain.errors import UserError
from hvdtrain.tasks.transform import is_image

CHANNELS = "task.channels"
Array = TypeVar("Array", bound=Any)  # of any framework
FIX = (
    "x (C, H, W) or (H, W, C) and y of the same H and W, with or without channels; or "
    f"{CHANNELS}=none for x and y (H, W)"
)


class MapLayout(NamedTuple):
    """One way to read the shape of a field as a map."""

    channels: Channels
    pixels: tuple[int, int]  # (H, W)
    channel_count: int  # 1 without them


class Maps(NamedTuple):
    """The layouts of x and y, whose maps have the same points."""

    x: MapLayout
    y: MapLayout

    @property
    def points(self) -> int:
        """The number of points of a map."""
        return math.prod(self.y.pixels)

    @property
    def map_shape(self) -> tuple[int, int, int]:
        """(H, W, C) of x"""
        return (*self.x.pixels, self.x.channel_count)

    @property
    def words(self) -> str:
        """Maps of 32x64 points, 3 channels -> 1."""
        height, width = self.y.pixels
        channels = f"{self.x.channel_count:,} -> {self.y.channel_count:,} channels"
        return f"maps of {height}x{width} points, {channels}"

    @property
    def facts(self) -> list[str]:
        return [self.x.channels, self.y.channels]

    def by_channel(self, y: Array) -> Array:
        """Converts y (n, ...) in the layout of the data to (n, channels, H W); n may be 0."""
        turned = y.swapaxes(1, -1) if self.y.channels == "last" else y  # (n, C, W, H)
        found: Array = turned.reshape(len(y), self.y.channel_count, self.points)
        return found

    def channels_first(self, y: np.ndarray) -> np.ndarray:
        """Converts y (n, ...) in the layout of the data, or flat, to (n, C, H, W)."""
        pixels = self.y.pixels
        if self.y.channels != "last":
            return y.reshape(len(y), self.y.channel_count, *pixels)
        return np.moveaxis(y.reshape(len(y), *pixels, self.y.channel_count), 3, 1)

    def in_layout_of_y(self, outputs: Array, channels: Channels) -> Array:
        """Converts maps (n, C, H, W), or (n, H, W, C) with channels="last", to the layout of y."""
        if self.y.channels == "none":
            one: Array = outputs[:, 0] if channels == "first" else outputs[..., 0]
            return one
        if self.y.channels == channels:
            return outputs
        turned: Array = outputs.swapaxes(1, 3)  # (n, W, H, C) or (n, C, W, H)
        is_last = self.y.channels == "last"
        return turned.swapaxes(1, 2) if is_last else turned.swapaxes(2, 3)

    def as_input(self, x: Array, channels: Channels) -> Array:
        """Converts x (n, ...) in the layout of the data to (n, C, H, W), or to (n, H, W, C) with
        channels="last"."""
        if self.x.channels == "none":
            whole: Array = x[:, None] if channels == "first" else x[..., None]
            return whole
        if self.x.channels == channels:
            return x
        turned: Array = x.swapaxes(1, 3)
        return turned.swapaxes(2, 3) if channels == "first" else turned.swapaxes(1, 2)


def takes_maps(model: ModelConfig, framework: str) -> bool:
    """Whether the model is one of hvdtrain's that maps to maps."""
    if plugins.is_dotted(model.name):
        return False
    folder = plugins.folder_of("model", framework)
    if model.name not in plugins.files(folder):
        return False
    build = plugins.load(folder, model.name, "model.name").build
    return "map_shape" in inspect.signature(build).parameters


def maps_of(x: Field, y: Field, channels: Channels | None) -> Maps | None:
    """Returns the layouts of two fields; None if they are not maps of the same points.

    channels: task.channels; None: wherever the shapes fit, and of several ways the one with the
    fewest channels. Raises UserError if the fields do not have channels there.
    """
    if x.padding is not None or y.padding is not None:
        return None
    found = [
        Maps(of_x, of_y)
        for of_x in _layouts(x)
        for of_y in _layouts(y)
        if of_x.pixels == of_y.pixels and _is_asked(is_image(x), of_x, of_y, channels)
    ]
    if not found and channels is not None:
        raise UserError(f"{CHANNELS}={channels} does not fit x {x} and y {y}", CHANNELS, FIX)
    return min(found, key=_channels_of, default=None)


def _layouts(field: Field) -> Sequence[MapLayout]:
    shape = field.shape
    if len(shape) == 2:
        return [MapLayout("none", (shape[0], shape[1]), 1)]
    if len(shape) != 3:
        return []
    last = MapLayout("last", (shape[0], shape[1]), shape[2])
    first = MapLayout("first", (shape[1], shape[2]), shape[0])
    return [last] if is_image(field) else [first, last]


def _is_asked(is_image_x: bool, x: MapLayout, y: MapLayout, channels: Channels | None) -> bool:
    """Whether task.channels allows these layouts. Images always have their channels last; other x
    have them where y has them."""
    if channels is None:
        same = y.channels in (x.channels, "none") or is_image_x
        return x.channels != "none" and same
    if is_image_x:
        return y.channels == channels
    return x.channels == channels and y.channels in (channels, "none")


def notes_on_layout(x: Field, y: Field, maps: Maps | None, channels: Channels | None) -> list[str]:
    """Returns a line for the header if the shapes fit another layout that is as likely."""
    if maps is None or channels is not None:
        return []
    used = maps.x.channels if maps.y.channels == "none" else maps.y.channels
    other: Channels = "last" if used == "first" else "first"
    found = _fitting(x, y, other)
    # with few channels on large maps the layout is certain
    if found is None or _channels_of(found) > 2 * _channels_of(maps):
        return []
    return [
        f"x {x.shape} and y {y.shape} are read with their channels {used}; {CHANNELS}={other} "
        f"reads them with their channels {other}"
    ]


def _fitting(x: Field, y: Field, channels: Channels) -> Maps | None:
    try:
        return maps_of(x, y, channels)
    except UserError:
        return None


def _channels_of(maps: Maps) -> int:
    return maps.x.channel_count + maps.y.channel_count


def maps_of_facts(x: Field, y: Field, facts: Sequence[str]) -> Maps:
    """Rebuilds Maps from its facts. Raises ValueError if these fields do not have such layouts."""
    of_x, of_y = (
        next((layout for layout in _layouts(field) if layout.channels == channels), None)
        for field, channels in zip((x, y), facts, strict=True)
    )
    if of_x is None or of_y is None or of_x.pixels != of_y.pixels:
        raise ValueError("impossible maps")
    return Maps(of_x, of_y)


def axis_of_channels(x: Field, maps: Maps | None, channels: Channels | None) -> Channels | None:
    """Returns where x has its channels, for statistics of each: as its maps, task.channels or the
    shorter of both axes say; None if x is not a map."""
    if maps is not None:
        return maps.x.channels
    of_x = [
        layout
        for layout in _layouts(x)
        if layout.channels == channels or (channels is None and layout.channels != "none")
    ]
    return min(of_x, key=lambda layout: layout.channel_count).channels if of_x else None
