"""How a torch model's samples reach the device: copied ahead of need, or gathered from a data set that stays there."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.core.arrays import Batch
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Task
from hvdtrain.frameworks.torch import augment

SHARE = 0.25  # of a GPU's free memory that a data set may take


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device, augmented. len() is its samples, n."""

    images: torch.Tensor  # uint8 (n, C, H, W)
    labels: torch.Tensor  # int64 (n,)
    weights: torch.Tensor | None = None  # (n,), the model's number type: a factor of each sample's loss
    partner_labels: torch.Tensor | None = None  # int64 (n,), of the images mixed in (mixup)
    mixup_weight: torch.Tensor | None = None  # (n,), the model's number type: of `labels` in the loss
    copied: torch.cuda.Event | None = None  # the copy to a GPU is over

    def __len__(self) -> int:
        return len(self.labels)


class Inputs:
    """Of one rank. to_device() may be called from other threads than the one that trains: on a GPU it has a stream of its own."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype, channels_last: bool) -> None:
        self.device, self._dtype, self._channels_last = device, dtype, channels_last
        self._mean = torch.tensor(task.mean, dtype=dtype, device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(task.std, dtype=dtype, device=device).view(1, -1, 1, 1)
        self._cached: tuple[torch.Tensor, torch.Tensor] | None = None  # images (n, H, W, C), labels
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def cache_on_device(self, source: Source, wanted: bool | None) -> bool:
        """Whether the set is on the device from now on: as data.resident says, or where it takes at most SHARE of a GPU's free memory.

        Raises UserError where it is wanted of a data set that is read sample by sample.
        """
        if wanted and not isinstance(source, ArraySource):
            raise UserError("this data set is read sample by sample: it cannot stay on the device", "data.resident=true", "leave it out")
        if not isinstance(source, ArraySource) or wanted is False or (wanted is None and not self._has_room(source.x.nbytes)):
            return False
        self._cached = torch.from_numpy(np.array(source.x)).to(self.device), torch.from_numpy(source.y.copy()).to(self.device)
        return True

    def to_device(self, batch: Batch) -> DeviceBatch:
        """The batch on the device, augmented by "augmentation" and "partner_augmentation".

        With "indices" in the place of "x" and "y" the samples come from the cached set, with "partner_indices" their partners in a mixture.
        """
        if self._copy_stream is None:
            return self._device_batch(batch)
        with torch.cuda.stream(self._copy_stream):
            return dataclasses.replace(self._device_batch(batch), copied=self._copy_stream.record_event())

    def images(self, batch: DeviceBatch) -> torch.Tensor:
        """x / 255, less its mean, over its deviation: (n, C, H, W) in the model's number type, on the stream that trains."""
        self._wait_for_copy(batch)
        return (batch.images.to(self._dtype) / 255.0 - self._mean) / self._std

    def _device_batch(self, batch: Batch) -> DeviceBatch:
        samples = self._gather_cached(batch) if "indices" in batch else self._copy_samples(batch)
        augmentation: Batch = {name: batch[name] for name in ("augmentation", "partner_augmentation", "mixup_weight") if name in batch}
        images = augment.augment_batch(augmentation | samples)["x"] if augmentation else samples["x"]
        if not self._channels_last:
            images = images.clone(memory_format=torch.contiguous_format)  # .contiguous() leaves one channel's strides as they are
        return DeviceBatch(
            images,
            labels=samples["y"],
            weights=self._copy(batch["w"]).to(self._dtype) if "w" in batch else None,
            partner_labels=samples.get("partner_y"),
            mixup_weight=self._copy(batch["mixup_weight"]).to(self._dtype) if "mixup_weight" in batch else None,
        )

    def _copy_samples(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The batch's "x" and "partner_x" as uint8 (n, C, H, W) in channels_last order, its "y" and "partner_y" as int64 (n,)."""
        images = {name: self._copy(batch[name]).permute(0, 3, 1, 2) for name in ("x", "partner_x") if name in batch}
        return images | {name: self._copy(batch[name]) for name in ("y", "partner_y") if name in batch}

    def _gather_cached(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The same, of the samples "indices" and "partner_indices" of the cached set."""
        assert self._cached is not None
        images, labels = self._cached
        samples = {}
        for indices, x, y in (("indices", "x", "y"), ("partner_indices", "partner_x", "partner_y")):
            if indices in batch:
                index = self._copy(batch[indices])
                samples[x] = images.index_select(0, index).permute(0, 3, 1, 2)
                samples[y] = labels.index_select(0, index)
        return samples

    def _copy(self, array: np.ndarray) -> torch.Tensor:
        """A tensor of the array's numbers, which the caller does not use any more."""
        tensor = torch.from_numpy(array)
        return tensor if self._copy_stream is None else tensor.pin_memory().to(self.device, non_blocking=True)

    def _wait_for_copy(self, batch: DeviceBatch) -> None:
        """The stream that trains waits for the copy, not the host; and the batch's memory is kept until that stream has read it."""
        if batch.copied is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(batch.copied)
        for tensor in (batch.images, batch.labels, batch.weights, batch.partner_labels, batch.mixup_weight):
            if tensor is not None:
                tensor.record_stream(stream)

    def _has_room(self, size: int) -> bool:
        return self.device.type == "cuda" and size <= SHARE * torch.cuda.mem_get_info(self.device)[0]


def use_channels_last(asked: bool | None, is_users_class: bool, model: torch.nn.Module, device: torch.device) -> bool:
    """Whether images come with their channels innermost: by default for all but a class of the user's own, which may view them flat.

    On a GPU the weights of convolutions are brought to that order too; a CPU's library keeps them in an order of its own.
    """
    wanted = not is_users_class if asked is None else asked
    if wanted and device.type == "cuda":
        untyped: Any = model  # torch's overloads of to() lack memory_format alone
        untyped.to(memory_format=torch.channels_last)
    return wanted
