"""CutMix (Yun 2019, arXiv:1905.04899): a box of another image, or of its mask, and the weights of
the two labels."""

from __future__ import annotations

import numpy as np


def cutmix_boxes(weights: np.ndarray, drawn: np.ndarray, height: int, width: int) -> np.ndarray:
    """Boxes of a share 1 - weight of the image (eq. 2), clipped at the border, int64 (n, 4): top,
    bottom, left, right.

    weights: float64 (n,), lambda; drawn: float64 (n, 2), uniform, of the centre. Sides are even, as
    in the authors' code.
    """
    sizes = np.array([height, width])
    centre = (drawn * sizes).astype(np.int64)
    half = (sizes * np.sqrt(1 - weights)[:, None] / 2).astype(np.int64)
    edges: np.ndarray = np.stack([centre - half, centre + half], axis=2).clip(0, sizes[:, None])
    return edges.reshape(-1, 4)


def remaining_shares(boxes: np.ndarray, height: int, width: int) -> np.ndarray:
    """The share of the image outside of its box: lambda after clipping, the weight of its own
    label; float64 (n,)."""
    top, bottom, left, right = boxes.T
    shares: np.ndarray = 1 - (bottom - top) * (right - left) / (height * width)
    return shares


def blend_weights(weights: np.ndarray | None, boxes: np.ndarray | None) -> np.ndarray | None:
    """The weights that images are mixed with by mixup, 1 where a box is pasted; None where there is
    nothing to mix."""
    if weights is None or boxes is None:
        return weights
    blended = np.where((boxes[:, 1] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 2]), 1.0, weights)
    return None if (blended == 1).all() else blended


def in_boxes(boxes: np.ndarray, height: int, width: int, channels: int = 1) -> np.ndarray:
    """bool (n, H, W C), of the values in boxes int64 (n, 4) of top, bottom, left, right."""
    top, bottom, left, right = (edge[:, None] for edge in boxes.T)
    rows = np.arange(height)
    columns = np.arange(width * channels) // channels
    inside: np.ndarray = ((rows >= top) & (rows < bottom))[:, :, None] & (
        (columns >= left) & (columns < right)
    )[:, None]
    return inside


def paste(x: np.ndarray, partner: np.ndarray, boxes: np.ndarray) -> np.ndarray:
    """Images (n, H, W, C), or masks (n, H, W), with the pixels of their partners in boxes (n, 4)
    (eq. 1)."""
    inside = in_boxes(boxes, *x.shape[1:])
    rows = inside.shape  # (n, H, W C): three channels would be a slow loop
    return np.where(inside, partner.reshape(rows), x.reshape(rows)).reshape(x.shape)
