"""How training images are changed: draws from counters, the same for a sample whoever reads it, and what they do to a batch.

A sample's draws are a pure function of (seed, epoch, sample), so they depend neither on the ranks nor on who else is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.config.read import Provenance
from hvdtrain.config.schema import AugmentConfig
from hvdtrain.core.arrays import Batch
from hvdtrain.core.seeds import fold
from hvdtrain.data.images.resize import resized
from hvdtrain.errors import UserError

_STREAM = 0xA063E470  # apart from the seeds of shuffles, weights of samples, dropout and noise
_TRIES = 10  # of a resized crop
# Each draw has counters of its own: what is switched on beside it changes nothing.
_SHIFT, _MIRROR, _SQUARE, _SHARE, _PARTNER = range(0, 2), range(2, 3), range(3, 5), range(5, 7), range(7, 8)
_BOX = range(16, 16 + 2 * _TRIES + 2)
SHARE_STEPS = 2**16  # a share of mixup is a multiple of 1 / this, so that float32 mixes bytes exactly: 8 + 16 bits


class AugmentationParameters(NamedTuple):
    """What happens to each of n images, in this order; None: not to any. There is a box or a shift, never both."""

    box: np.ndarray | None = None  # int64 (n, 4): top, left, height, width of what is brought to the image's size
    shift: np.ndarray | None = None  # int64 (n, 2), down and right, of the window that is cut: beyond the image it is black
    mirrored: np.ndarray | None = None  # bool (n,)
    square: np.ndarray | None = None  # int64 (n, 4): top, bottom, left, right of what is blackened, cut off at the border
    share: np.ndarray | None = None  # float64 (n,) of the image itself in its mixture


def is_on(augment: AugmentConfig) -> bool:
    """Whether anything is to be drawn at all."""
    return augment != AugmentConfig()


def check(augment: AugmentConfig, shape: tuple[int, int, int], provenance: Provenance) -> None:
    """Raises a UserError where nothing of an image (H, W, C) might be left, or where two cuts contradict each other."""
    height, width, _ = shape
    size = f"of images of {height} x {width} pixels"
    wrong = [
        (bool(augment.crop and augment.resized_crop), "crop", "a crop and a resized crop of the same image", "keep one of them"),
        (augment.crop >= min(height, width), "crop", f"crop={augment.crop} may keep nothing {size}", f"less than {min(height, width)}"),
        (augment.cutout >= max(height, width), "cutout", f"cutout={augment.cutout} may blacken all {size}",
         f"less than {max(height, width)}"),
    ]  # fmt: skip
    for is_wrong, key, what, fix in wrong:
        if is_wrong:
            raise UserError(what, provenance.where(f"augment.{key}"), fix)


def draw(augment: AugmentConfig, seed: int, epochs: np.ndarray, rows: np.ndarray, shape: tuple[int, int, int]) -> AugmentationParameters:
    """What happens to the samples `rows`, int64 (n,), in their epochs, int64 (n,); images are `shape`, (H, W, C)."""
    keys, (height, width, _) = _keys(seed, epochs, rows), shape
    return AugmentationParameters(
        box=_boxes(_uniform(keys, _BOX), augment.resized_crop, height, width) if augment.resized_crop else None,
        shift=_below(_uniform(keys, _SHIFT), 2 * augment.crop + 1) - augment.crop if augment.crop and not augment.resized_crop else None,
        mirrored=_uniform(keys, _MIRROR)[:, 0] < 0.5 if augment.flip else None,
        square=_squares(_uniform(keys, _SQUARE), augment.cutout, height, width) if augment.cutout else None,
        share=_shares(_uniform(keys, _SHARE), augment.mixup) if augment.mixup else None,
    )


def partners(augment: AugmentConfig, seed: int, epochs: np.ndarray, rows: np.ndarray, dataset: int) -> np.ndarray | None:
    """The sample that each is mixed with, int64 (n,): any of the data set, itself included, each equally likely.

    Zhang 2017 mixes a batch with its own permutation; that would depend on how the batch is shared out to ranks and passes.
    """
    return _below(_uniform(_keys(seed, epochs, rows), _PARTNER)[:, 0], dataset) if augment.mixup else None


def finish(batch: Batch) -> Batch:
    """The batch with "drawn" done to "x", "drawn2" to the partners' "x2", and both mixed by "share": without these keys but "share"."""
    return finish_with(apply, mix, batch)


def finish_with(change: Callable[[Any, AugmentationParameters], Any], blend: Callable[[Any, Any, Any], Any], batch: Batch) -> Batch:
    """finish(), by any framework's apply() and mix()."""
    done = {key: value for key, value in batch.items() if key not in ("drawn", "x2", "drawn2")}
    if batch.get("drawn") is not None:
        done["x"] = change(batch["x"], batch["drawn"])
    if "x2" in batch:
        other = batch["x2"] if batch.get("drawn2") is None else change(batch["x2"], batch["drawn2"])
        done["x"] = blend(done["x"], other, batch["share"])
    return done


def apply(x: np.ndarray, augmentation: AugmentationParameters) -> np.ndarray:
    """uint8 (n, H, W, C) -> the same, changed: all but mixing. `x` is left as it was."""
    x = np.ascontiguousarray(x)
    if augmentation.box is not None:
        x = resized(x, augmentation.box, augmentation.mirrored)
    else:
        x = x if augmentation.shift is None else _shifted(x, augmentation.shift)
        x = x if augmentation.mirrored is None else _mirrored(x, augmentation.mirrored)
    return x if augmentation.square is None else _cut(x, augmentation.square)


def mix(x: np.ndarray, other: np.ndarray, share: np.ndarray) -> np.ndarray:
    """share x + (1 - share) other of uint8 (n, H, W, C), rounded half up; exact for shares that are multiples of 1 / SHARE_STEPS.

    Zhang 2017 mixes real numbers: a byte is at most half a level off.
    """
    own = (np.rint(share * SHARE_STEPS) / SHARE_STEPS).astype(np.float32)[:, None, None, None]
    mixed: np.ndarray = (x * own + other * (1 - own) + np.float32(0.5)).astype(np.uint8)  # no step of this rounds
    return mixed


def _shifted(x: np.ndarray, shift: np.ndarray) -> np.ndarray:
    n, height, width, channels = x.shape
    far = int(np.abs(shift).max(initial=0))
    padded = np.zeros((n, height + 2 * far, width + 2 * far, channels), np.uint8)
    padded[:, far : far + height, far : far + width] = x
    windows = np.lib.stride_tricks.sliding_window_view(padded, (height, width), axis=(1, 2))  # (n, 2 far + 1, 2 far + 1, C, H, W)
    return np.ascontiguousarray(np.moveaxis(windows, 3, -1)[np.arange(n), far + shift[:, 0], far + shift[:, 1]])


def _mirrored(x: np.ndarray, mirrored: np.ndarray) -> np.ndarray:
    n, height, width, channels = x.shape
    turned = x.copy()
    pixels = turned.reshape(n, height, width * channels).view(f"V{channels}")  # (n, H, W): a pixel moves as one, twice as fast as bytes
    pixels[mirrored] = pixels[mirrored][:, :, ::-1]
    return turned


def _cut(x: np.ndarray, square: np.ndarray) -> np.ndarray:
    _, height, width, channels = x.shape
    top, bottom, left, right = (edge[:, None] for edge in square.T)
    rows, columns = np.arange(height), np.arange(width * channels) // channels
    black = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]  # (n, H, W C)
    return (x.reshape(black.shape) * ~black).reshape(x.shape)


def _keys(seed: int, epochs: np.ndarray, rows: np.ndarray) -> np.ndarray:
    keys: np.ndarray = fold(seed, _STREAM, epochs.astype(np.uint64), rows.astype(np.uint64))
    return keys


def _uniform(keys: np.ndarray, counters: range) -> np.ndarray:
    """(n,) -> (n, counters), float64 strictly between 0 and 1: 52 bits and a half."""
    bits = fold(keys[:, None], np.array(counters, np.uint64))
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) / 2.0**52


def _below(uniform: np.ndarray, limit: int) -> np.ndarray:
    """int64 0 ... limit - 1, each equally likely up to limit / 2^52."""
    return (uniform * limit).astype(np.int64)


def _squares(uniform: np.ndarray, side: int, height: int, width: int) -> np.ndarray:
    """Centres on any pixel, so that a square at the border loses what lies beyond it (DeVries 2017, section 3.2).

    Their code makes a square of 2 (side // 2) pixels and sets it to 0 after normalization, the mean colour; ours has `side` and is black.
    """
    centre = (uniform * (height, width)).astype(np.int64)
    first = centre - side // 2  # (n, 2)
    return np.stack([first, first + side], axis=2).clip(0, np.array([[height], [width]])).reshape(-1, 4)


def _boxes(uniform: np.ndarray, smallest: float, height: int, width: int) -> np.ndarray:
    """The law of torchvision's RandomResizedCrop: area uniform, ratio log-uniform, the first of ten tries that fits, else the middle."""
    area = height * width * (smallest + (1 - smallest) * uniform[:, :_TRIES])
    ratio = np.exp(np.log(4 / 3) * (2 * uniform[:, _TRIES : 2 * _TRIES] - 1))
    tall, wide = np.rint(np.sqrt(area / ratio)).astype(np.int64), np.rint(np.sqrt(area * ratio)).astype(np.int64)  # (n, tries)
    fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
    some, first = fits.any(1), (np.arange(len(fits)), fits.argmax(1))
    most = min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))  # of the middle, no more than 4 to 3
    sides = np.where(some[:, None], np.stack([tall[first], wide[first]], axis=1), most)
    room = (height, width) - sides
    corner = np.where(some[:, None], (uniform[:, 2 * _TRIES :] * (room + 1)).astype(np.int64), room // 2)
    return np.concatenate([corner, sides], axis=1)


def _shares(uniform: np.ndarray, alpha: float) -> np.ndarray:
    """Beta(alpha, alpha) in closed form from two counters, for any alpha, then rounded to 1 / SHARE_STEPS: the only error of the law.

    t = sqrt(alpha (u^(-1/alpha) - 1)) cos(2 pi v) sqrt(2) has Student's law of 2 alpha degrees of freedom (Bailey 1994, "Polar
    generation of random variates with the t-distribution"), and 1/2 + t / (2 sqrt(2 alpha + t^2)) is then Beta(alpha, alpha).
    Written with u^(1/alpha), which goes to 0 where its inverse would be infinite.
    """
    power = np.log(uniform[:, 0]) / alpha
    cosine = np.cos(2 * np.pi * uniform[:, 1])
    spread = np.exp(power) / (-np.expm1(power) * cosine**2)  # 2 alpha / t^2
    return np.rint((0.5 + 0.5 * np.sign(cosine) / np.sqrt(1 + spread)) * SHARE_STEPS) / SHARE_STEPS
