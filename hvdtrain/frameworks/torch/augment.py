"""What data/images/augment.py does to images, on tensors of any device, byte for byte."""

from __future__ import annotations

import numpy as np
import torch

from hvdtrain.core.arrays import Batch
from hvdtrain.data.images import augment
from hvdtrain.data.images.augment import MIXUP_WEIGHT_STEPS, AugmentationParameters
from hvdtrain.data.images.resized_crop import WEIGHT_ONE, interpolate_box


def augment_batch(batch: Batch) -> Batch:
    """As in data/images/augment.py, for tensors "x" and "partner_x" uint8 (n, C, H, W); the other values may be arrays or tensors."""
    return augment.augment_batch_with(apply, mixup, batch)


def apply(x: torch.Tensor, augmentation: AugmentationParameters) -> torch.Tensor:
    """uint8 (n, C, H, W) in channels_last order -> the same, changed: all but mixing. `x` is left as it was.

    In host memory numpy does it, on a view: faster than torch's gathers, and without waking threads that others need.
    """
    pixels = x.permute(0, 2, 3, 1).contiguous()  # (n, H, W, C): a view where the order is channels_last
    if x.device.type == "cpu":
        return torch.from_numpy(augment.apply(pixels.numpy(), augmentation)).permute(0, 3, 1, 2)
    return gathered(pixels, augmentation).permute(0, 3, 1, 2)


def gathered(pixels: torch.Tensor, augmentation: AugmentationParameters) -> torch.Tensor:
    """(n, H, W, C), contiguous, on any device -> the same, changed by gathers of pixels."""
    if augmentation.crop_box is not None:
        pixels = _resized(pixels, augmentation.crop_box, augmentation.flipped)
    elif augmentation.shift is not None or augmentation.flipped is not None:
        pixels = _moved(pixels, augmentation.shift, augmentation.flipped)
    return pixels if augmentation.cutout_box is None else _cut(pixels, augmentation.cutout_box)


def mixup(x: torch.Tensor, other: torch.Tensor, share: torch.Tensor | np.ndarray) -> torch.Tensor:
    """share x + (1 - share) other, rounded half up, in the order of `x`."""
    if x.device.type == "cpu":
        own, partner = (of.permute(0, 2, 3, 1).contiguous().numpy() for of in (x, other))
        return torch.from_numpy(augment.mixup(own, partner, np.asarray(share))).permute(0, 3, 1, 2)
    return blended(x, other, share)


def blended(x: torch.Tensor, other: torch.Tensor, share: torch.Tensor | np.ndarray) -> torch.Tensor:
    """mixup() on any device. float32 is exact here, so a device that fuses products and sums changes nothing."""
    exact = torch.as_tensor(share, device=x.device).mul(MIXUP_WEIGHT_STEPS).round() / MIXUP_WEIGHT_STEPS
    own = exact.float()[:, None, None, None]
    return (x * own + other * (1 - own) + 0.5).to(torch.uint8)


def _moved(pixels: torch.Tensor, shift: np.ndarray | None, mirrored: np.ndarray | None) -> torch.Tensor:
    """Windows and mirroring by one gather of pixels from images with a black border."""
    n, height, width, channels = pixels.shape
    far = 0 if shift is None else int(np.abs(shift).max(initial=0))
    tall, wide = height + 2 * far, width + 2 * far
    padded = pixels
    if far:
        padded = pixels.new_zeros(n, tall, wide, channels)
        padded[:, far : far + height, far : far + width] = pixels
    index = np.int32 if n * tall * wide < 2**31 else np.int64  # half the memory, and the gather takes either
    across = np.arange(width)
    windows = (wide * np.arange(height)[:, None] + np.stack([across, across[::-1]])[:, None]).reshape(2, height * width)
    start = tall * wide * np.arange(n)
    if shift is not None:
        start = start + (far + shift[:, 0]) * wide + far + shift[:, 1]
    place = _there(windows.astype(index), pixels)
    place = place[:1] if mirrored is None else place.index_select(0, _there(mirrored.astype(np.int64), pixels))  # (n, H W)
    place = place + _there(start.astype(index), pixels)[:, None]
    return padded.view(n * tall * wide, channels).index_select(0, place.view(-1)).view(n, height, width, channels)


def _cut(pixels: torch.Tensor, square: np.ndarray) -> torch.Tensor:
    _, height, width, channels = pixels.shape
    top, bottom, left, right = _there(square.astype(np.int32), pixels)[:, :, None].unbind(1)  # (n, 1) each
    rows = torch.arange(height, device=pixels.device, dtype=torch.int32)
    columns = torch.arange(width, device=pixels.device, dtype=torch.int32).repeat_interleave(channels, output_size=width * channels)
    black = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None]  # (n, H, W C)
    return (pixels.view(black.shape) * ~black).view(pixels.shape)


def _resized(pixels: torch.Tensor, box: np.ndarray, mirrored: np.ndarray | None) -> torch.Tensor:
    n, height, width, channels = pixels.shape
    (upper, lower, down), (before, after, right) = (
        [_there(a, pixels) for a in axis] for axis in interpolate_box(box, mirrored, height, width)
    )
    whole, start = pixels.view(n * height, width * channels), height * _count(n, pixels)[:, None]
    above, below = (whole.index_select(0, (start + of).view(-1)).view(n, height, width * channels) for of in (upper, lower))
    weight = down[:, :, None]
    mixed = above * (WEIGHT_ONE - weight) + below * weight  # int32 (n, H, W C)
    points, start = mixed.view(n * height * width, channels), (width * _count(n * height, pixels)).view(n, height, 1)
    sides = [points.index_select(0, (start + of[:, None]).view(-1)).view(n, height, width, channels) for of in (before, after)]
    weight = right[:, None, :, None]
    total = sides[0] * (WEIGHT_ONE - weight) + sides[1] * weight  # at most 255 x 2^22
    return ((total + WEIGHT_ONE * WEIGHT_ONE // 2) >> 22).to(torch.uint8)


def _count(n: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(n, device=like.device)


def _there(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if like.device.type == "cpu" else tensor.pin_memory().to(like.device, non_blocking=True)
