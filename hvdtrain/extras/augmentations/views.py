"""Test-time augmentation (evaluate.views): the mean of a model's outputs for an image, its mirror
image and shifted copies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.config.schema import Config
from hvdtrain.data.field import Field
from hvdtrain.data.images.averaging import Averaging
from hvdtrain.errors import UserError


class View(NamedTuple):
    """One view of an image."""

    weight: float  # in the mean
    # moves a window of the image's size by -1, 0 or 1 pixel down and right; pixels outside the
    # image are mirrored, as with augment.pad=reflect
    shift: int
    mirrored: bool  # left to right, after the shift


# Views for each evaluate.views, weighted as by Jordan (2024, arXiv:2404.00498, and
# KellerJordan/cifar10-airbench). With six views, the image and its mirror image have half of the
# weight, and the four shifted views have the other half. The weights are powers of 2, so they cause
# no rounding.
VIEWS: dict[int, tuple[View, ...]] = {
    1: (View(1.0, 0, mirrored=False),),
    2: tuple(View(0.5, 0, mirrored) for mirrored in (False, True)),
    6: tuple(
        View(0.25 if shift == 0 else 0.125, shift, mirrored)
        for shift in (0, -1, 1)
        for mirrored in (False, True)
    ),
}


@dataclass(frozen=True)
class Views(Averaging):
    """The views of images in one job. The mean over the views of a sample depends only on that
    sample."""

    views: tuple[View, ...] = VIEWS[1]
    axes: tuple[int, int] = (1, 2)  # height and width of a batch in the axis order of the data

    def mean(
        self,
        arrays: Mapping[str, Any],
        outputs_of: Callable[[Mapping[str, Any]], Any],
        xp: Any,
        axes: tuple[int, int] | None = None,
    ) -> Any:
        """Returns the sum over the views of weight times outputs_of(arrays with that view of "x");
        for a single view, outputs_of(arrays).

        xp: numpy, jax.numpy or torch, whichever "x" belongs to; axes: height and width of "x", if
        they differ from the axes of the data.
        """
        if len(self.views) == 1:
            return outputs_of(arrays)
        x = arrays["x"]
        weighted = (
            view.weight * outputs_of({**arrays, "x": _seen(x, view, xp, axes or self.axes)})
            for view in self.views
        )
        return sum(weighted, start=0.0)


def make_views(config: Config, fields: Mapping[str, Field]) -> Views:
    """Creates the views for samples of these fields: x uint8 (H, W, C), or other numbers (C, H, W).
    Raises UserError for other shapes."""
    count = config.evaluate.views
    if count == 1:
        return Views()
    x = fields.get("x", Field("none", ()))
    is_image = len(x.shape) == 3
    axes = (1, 2) if x.dtype == "uint8" else (2, 3)
    if not is_image or min(x.shape[axis - 1] for axis in axes) < 2:
        found = f"x {x}" if "x" in fields else f"no field x but {', '.join(fields)}"
        what = (
            f"evaluate.views={count} needs images of at least 2 x 2 pixels; the data have {found}"
        )
        raise UserError(what, config.where("evaluate.views"), "evaluate.views=1, or image data")
    return Views(VIEWS[count], axes)


def _seen(x: Any, view: View, xp: Any, axes: tuple[int, int]) -> Any:
    """Returns a view of images (n, ...)."""
    for axis in axes if view.shift else ():
        x = _shift(x, view.shift, xp, axis)
    return xp.flip(x, (axes[1],)) if view.mirrored else x


def _shift(x: Any, shift: int, xp: Any, axis: int) -> Any:
    """Shifts n elements along one axis: shift 1 returns elements 1, 2, ..., n-1, n-2, and shift -1
    returns 1, 0, 1, ..., n-2."""

    def part(start: int | None, stop: int | None) -> Any:
        return x[(slice(None),) * axis + (slice(start, stop),)]

    if shift == 1:
        return xp.concatenate([part(1, None), part(-2, -1)], axis)
    assert shift == -1, shift
    return xp.concatenate([part(1, 2), part(None, -1)], axis)
