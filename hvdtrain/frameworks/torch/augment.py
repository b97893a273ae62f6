"""The augmentations of data/images/augment.py on tensors of any device, with the same bytes."""

from __future__ import annotations

import numpy as np
import torch

from hvdtrain.core.arrays import Batch
from hvdtrain.core.extras import implementing_module
from hvdtrain.data.images import augment, mixing
from hvdtrain.data.images.augment import AugmentationParameters
from hvdtrain.data.images.mixing import MIXUP_WEIGHT_STEPS, paste
from hvdtrain.data.images.resized_crop import WEIGHT_ONE, interpolate_box


def augment_batch(batch: Batch) -> Batch:
    """Augments like data/images/augment.py, for tensors "x", "partner_x" uint8 (n, C, H, W). The
    other values may be arrays or tensors."""
    return augment.augment_batch_with(apply, mix, batch)


def apply(x: torch.Tensor, parameters: AugmentationParameters) -> torch.Tensor:
    """Augments x, uint8 (n, C, H, W) in channels_last order, by everything except mixup and CutMix.
    `x` is not changed.

    In host memory NumPy does it on a view, which is faster than torch's gathers and does not wake
    threads that others need.
    """
    pixels = x.permute(
        0, 2, 3, 1
    ).contiguous()  # (n, H, W, C), a view if the order is channels_last
    if x.device.type == "cpu":
        return torch.from_numpy(augment.apply(pixels.numpy(), parameters)).permute(0, 3, 1, 2)
    return apply_by_gathers(pixels, parameters).permute(0, 3, 1, 2)


def apply_by_gathers(pixels: torch.Tensor, parameters: AugmentationParameters) -> torch.Tensor:
    """Implements apply() for contiguous (n, H, W, C), on any device."""
    if parameters.crop_box is not None:
        pixels = _resized_crop(pixels, parameters.crop_box, parameters.flipped)
    elif parameters.reflected_shift is not None:
        pixels = _shift_and_flip(
            pixels, parameters.reflected_shift, parameters.flipped, reflects=True
        )
    elif parameters.shift is not None or parameters.flipped is not None:
        pixels = _shift_and_flip(pixels, parameters.shift, parameters.flipped)
    if parameters.has_changes:
        pixels = implementing_module(augment.CHANGES).apply_on_device(pixels, parameters)
    return pixels if parameters.cutout_box is None else _cutout(pixels, parameters.cutout_box)


def mix(
    x: torch.Tensor, partner: torch.Tensor, weights: np.ndarray | None, boxes: np.ndarray | None
) -> torch.Tensor:
    """Applies mixup() by weights and pastes the partners' pixels in boxes, if given."""
    x = x if weights is None else mixup(x, partner, weights)
    if boxes is None:
        return x
    if x.device.type == "cpu":
        images, partners = (
            tensor.permute(0, 2, 3, 1).contiguous().numpy() for tensor in (x, partner)
        )
        return torch.from_numpy(paste(images, partners, boxes)).permute(0, 3, 1, 2)
    return paste_on_device(x, partner, boxes)


def paste_on_device(x: torch.Tensor, partner: torch.Tensor, boxes: np.ndarray) -> torch.Tensor:
    """Implements paste() of mixing.py for (n, C, H, W), on any device."""
    return torch.where(in_boxes(boxes, x, *x.shape[2:])[:, None], partner, x)


def mixup(
    x: torch.Tensor, partner: torch.Tensor, weight: torch.Tensor | np.ndarray
) -> torch.Tensor:
    """Returns weight x + (1 - weight) partner, rounded half up, in the memory order of `x`."""
    if x.device.type == "cpu":
        images, partners = (
            tensor.permute(0, 2, 3, 1).contiguous().numpy() for tensor in (x, partner)
        )
        return torch.from_numpy(mixing.mixup(images, partners, np.asarray(weight))).permute(
            0, 3, 1, 2
        )
    return mixup_on_device(x, partner, weight)


def mixup_on_device(
    x: torch.Tensor, partner: torch.Tensor, weight: torch.Tensor | np.ndarray
) -> torch.Tensor:
    """Implements mixup() on any device. float32 is exact here, so a device with fused multiply-add
    computes the same bytes."""
    exact = (
        torch.as_tensor(weight, device=x.device).mul(MIXUP_WEIGHT_STEPS).round()
        / MIXUP_WEIGHT_STEPS
    )
    factor = exact.float()[:, None, None, None]
    return (x * factor + partner * (1 - factor) + 0.5).to(torch.uint8)


def _shift_and_flip(
    pixels: torch.Tensor,
    shift: np.ndarray | None,
    flipped: np.ndarray | None,
    reflects: bool = False,
) -> torch.Tensor:
    """Shifts and flips with one gather, from images with a black or reflecting border."""
    n, height, width, channels = pixels.shape
    border = 0 if shift is None else int(np.abs(shift).max(initial=0))
    tall = height + 2 * border
    wide = width + 2 * border
    padded = pixels
    if border and reflects:
        for axis, size in ((1, height), (2, width)):
            padded = padded.index_select(
                axis, to_device(np.pad(np.arange(size), border, mode="reflect"), pixels)
            )
    elif border:
        padded = pixels.new_zeros(n, tall, wide, channels)
        padded[:, border : border + height, border : border + width] = pixels
    # half the memory, and the gather takes either
    index_type = np.int32 if n * tall * wide < 2**31 else np.int64
    across = np.arange(width)
    windows = (
        wide * np.arange(height)[:, None] + np.stack([across, across[::-1]])[:, None]
    ).reshape(2, height * width)
    start = tall * wide * np.arange(n)  # offset of each image's window
    if shift is not None:
        start = start + (border + shift[:, 0]) * wide + border + shift[:, 1]
    index = to_device(windows.astype(index_type), pixels)
    # (n, H W)
    index = (
        index[:1]
        if flipped is None
        else index.index_select(0, to_device(flipped.astype(np.int64), pixels))
    )
    index = index + to_device(start.astype(index_type), pixels)[:, None]
    return (
        padded.view(n * tall * wide, channels)
        .index_select(0, index.view(-1))
        .view(n, height, width, channels)
    )


def in_boxes(boxes: np.ndarray, like: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Returns bool (n, H, W): which pixels lie in the boxes."""
    # (n, 1) each
    top, bottom, left, right = to_device(boxes.astype(np.int32), like)[:, :, None].unbind(1)
    rows, columns = (
        torch.arange(size, device=like.device, dtype=torch.int32) for size in (height, width)
    )
    return ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[
        :, None
    ]


def _cutout(pixels: torch.Tensor, box: np.ndarray) -> torch.Tensor:
    _, height, width, channels = pixels.shape
    # (n, 1) each
    top, bottom, left, right = to_device(box.astype(np.int32), pixels)[:, :, None].unbind(1)
    rows = torch.arange(height, device=pixels.device, dtype=torch.int32)
    columns = torch.arange(width, device=pixels.device, dtype=torch.int32).repeat_interleave(
        channels, output_size=width * channels
    )
    # (n, H, W C)
    black = ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[
        :, None
    ]
    return (pixels.view(black.shape) * ~black).view(pixels.shape)


def _resized_crop(
    pixels: torch.Tensor, box: np.ndarray, flipped: np.ndarray | None
) -> torch.Tensor:
    n, height, width, channels = pixels.shape
    (upper, lower, down), (before, after, right) = (
        [to_device(array, pixels) for array in axis]
        for axis in interpolate_box(box, flipped, height, width)
    )
    rows = pixels.view(n * height, width * channels)
    first_row = height * _arange(n, pixels)[:, None]
    above, below = (
        rows.index_select(0, (first_row + row).view(-1)).view(n, height, width * channels)
        for row in (upper, lower)
    )
    weight = down[:, :, None]
    mixed = above * (WEIGHT_ONE - weight) + below * weight  # int32 (n, H, W C)
    points = mixed.view(n * height * width, channels)
    first_point = (width * _arange(n * height, pixels)).view(n, height, 1)
    left_point, right_point = (
        points.index_select(0, (first_point + column[:, None]).view(-1)).view(
            n, height, width, channels
        )
        for column in (before, after)
    )
    weight = right[:, None, :, None]
    total = left_point * (WEIGHT_ONE - weight) + right_point * weight  # at most 255 x 2^22
    return ((total + WEIGHT_ONE * WEIGHT_ONE // 2) >> 22).to(torch.uint8)


def _arange(n: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(n, device=like.device)


def to_device(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Copies a host array to the device of `like`; the host does not wait."""
    tensor = torch.from_numpy(array)
    return (
        tensor
        if like.device.type == "cpu"
        else tensor.pin_memory().to(like.device, non_blocking=True)
    )
