"""mixup (Zhang 2017, arXiv:1710.09412) and CutMix (Yun 2019, arXiv:1905.04899): draws the weights
of each sample, and mixes images, masks and labels of two samples."""

from __future__ import annotations

import numpy as np

from hvdtrain.config.sections.augment import AugmentConfig
from hvdtrain.data.images.resized_crop import draw_keys, integers, uniform

# counters of the random numbers; augment.py lists all counters
_MIXUP_WEIGHT = range(5, 7)
_PARTNER = range(7, 8)  # for mixup and CutMix
_CUTMIX_WEIGHT = range(40, 42)
_CUTMIX_CENTRE = range(42, 44)
_IS_CUTMIX = range(44, 45)
# a mixup weight is a multiple of the inverse, so that float32 mixes bytes exactly: 8 + 16 bits
MIXUP_WEIGHT_STEPS = 2**16


def draw_mixtures(
    augment: AugmentConfig, keys: np.ndarray, height: int, width: int
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Draws AugmentationParameters.cutmix_box and mixup_weight. If both are on, each sample gets
    one of them with probability 1/2, as in timm."""
    weight = _beta(uniform(keys, _MIXUP_WEIGHT), augment.mixup) if augment.mixup else None
    if not augment.cutmix:
        return None, weight
    drawn = _beta(uniform(keys, _CUTMIX_WEIGHT), augment.cutmix)
    box = cutmix_boxes(drawn, uniform(keys, _CUTMIX_CENTRE), height, width)
    if weight is None:
        return box, remaining_shares(box, height, width)
    is_cutmix = uniform(keys, _IS_CUTMIX)[:, 0] < 0.5
    box = np.where(is_cutmix[:, None], box, 0)
    return box, np.where(is_cutmix, remaining_shares(box, height, width), weight)


def partners_of(
    augment: AugmentConfig, seed: int, epochs: np.ndarray, samples: np.ndarray, dataset: int
) -> np.ndarray | None:
    """Draws the partner of each sample, int64 (n,): any sample of the data set, including itself,
    with equal probability.

    None without mixup and CutMix.

    Zhang 2017 and Yun 2019 mix a batch with a permutation of itself. Here that would depend on how
    the batch is split over ranks and micro-batches.
    """
    if not augment.mixup and not augment.cutmix:
        return None
    return integers(uniform(draw_keys(seed, epochs, samples), _PARTNER)[:, 0], dataset)


def cutmix_boxes(weights: np.ndarray, drawn: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns boxes that cover 1 - weight of the image (eq. 2), clipped at the border, int64 (n,
    4): top, bottom, left, right.

    weights: float64 (n,), lambda; drawn: float64 (n, 2), uniform numbers for the centre. Sides are
    even, as in the authors' code.
    """
    sizes = np.array([height, width])
    centre = (drawn * sizes).astype(np.int64)
    half = (sizes * np.sqrt(1 - weights)[:, None] / 2).astype(np.int64)
    edges: np.ndarray = np.stack([centre - half, centre + half], axis=2).clip(0, sizes[:, None])
    return edges.reshape(-1, 4)


def remaining_shares(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """Returns the share of the image outside its box, float64 (n,): lambda after clipping, which is
    the weight of the image's own label."""
    top, bottom, left, right = boxes.T
    shares: np.ndarray = 1 - (bottom - top) * (right - left) / (height * width)
    return shares


def blend_weights(weights: np.ndarray | None, boxes: np.ndarray | None) -> np.ndarray | None:
    """Returns the mixup weights of images, 1 for images with a pasted box; None if there is nothing
    to mix."""
    if weights is None or boxes is None:
        return weights
    blended = np.where((boxes[:, 1] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 2]), 1.0, weights)
    return None if (blended == 1).all() else blended


def in_boxes(boxes: np.ndarray, height: int, width: int, channels: int = 1) -> np.ndarray:
    """Returns which values lie in the boxes, bool (n, H, W C); boxes: int64 (n, 4) of top, bottom,
    left, right."""
    top, bottom, left, right = (edge[:, None] for edge in boxes.T)
    rows = np.arange(height)
    columns = np.arange(width * channels) // channels
    inside: np.ndarray = ((rows >= top) & (rows < bottom))[:, :, None] & (
        (columns >= left) & (columns < right)
    )[:, None]
    return inside


def paste(x: np.ndarray, partner: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Replaces the pixels in boxes (n, 4) by the partners' pixels (eq. 1), in images (n, H, W, C)
    or masks (n, H, W)."""
    inside = in_boxes(boxes, *x.shape[1:])
    rows = inside.shape  # (n, H, W C): three channels would be a slow loop
    return np.where(inside, partner.reshape(rows), x.reshape(rows)).reshape(x.shape)


def mix(
    x: np.ndarray, partner: np.ndarray, weights: np.ndarray | None, boxes: np.ndarray | None
) -> np.ndarray:
    """Applies mixup() by weights and paste() in boxes, if given; uint8 (n, H, W, C)."""
    x = x if weights is None else mixup(x, partner, weights)
    return x if boxes is None else paste(x, partner, boxes)


def mixup(x: np.ndarray, partner: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns weight x + (1 - weight) partner, uint8 (n, H, W, C), rounded half up; exact if
    weights are multiples of 1 / MIXUP_WEIGHT_STEPS.

    Zhang 2017 mixes real numbers; a byte here differs by at most half a level.
    """
    weight = (np.rint(weight * MIXUP_WEIGHT_STEPS) / MIXUP_WEIGHT_STEPS).astype(np.float32)[
        :, None, None, None
    ]
    # none of these operations rounds
    mixed: np.ndarray = (x * weight + partner * (1 - weight) + np.float32(0.5)).astype(np.uint8)
    return mixed


def _beta(drawn: np.ndarray, alpha: float) -> np.ndarray:
    """Draws from Beta(alpha, alpha) in closed form from two uniform numbers; float64 (n,), rounded
    to a multiple of 1 / MIXUP_WEIGHT_STEPS.

    t = sqrt(alpha (u^(-1/alpha) - 1)) cos(2 pi v) sqrt(2) follows Student's t-distribution with 2
    alpha degrees of freedom (Bailey 1994, "Polar generation of random variates with the
    t-distribution"), and 1/2 + t / (2 sqrt(2 alpha + t^2)) is then Beta(alpha, alpha). The code
    uses u^(1/alpha), which tends to 0, because its inverse would become infinite.
    """
    power = np.log(drawn[:, 0]) / alpha
    cosine = np.cos(2 * np.pi * drawn[:, 1])
    spread = np.exp(power) / (-np.expm1(power) * cosine**2)  # 2 alpha / t^2
    return (
        np.rint((0.5 + 0.5 * np.sign(cosine) / np.sqrt(1 + spread)) * MIXUP_WEIGHT_STEPS)
        / MIXUP_WEIGHT_STEPS
    )
