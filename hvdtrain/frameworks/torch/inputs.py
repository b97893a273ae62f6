"""Where a torch model's samples come to the device: copied ahead of need, or gathered from a set that stays there."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hvdtrain.core.arrays import Batch
from hvdtrain.data.source import ArraySource, Source
from hvdtrain.errors import UserError
from hvdtrain.frameworks.learner import Task
from hvdtrain.frameworks.torch import augment

SHARE = 0.25  # of a GPU's free memory that a data set may take


class Inputs:
    """Of one rank. to_device() may be called from other threads than the one that trains: on a GPU it has a stream of its own."""

    def __init__(self, task: Task, device: torch.device, dtype: torch.dtype, channels_last: bool) -> None:
        self.device, self._dtype, self._channels_last = device, dtype, channels_last
        self._mean = torch.tensor(task.mean, dtype=dtype, device=device).view(1, -1, 1, 1)
        self._std = torch.tensor(task.std, dtype=dtype, device=device).view(1, -1, 1, 1)
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None  # images (n, H, W, C), labels
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def cache_on_device(self, source: Source, wanted: bool | None) -> bool:
        """Whether the set is on the device from now on: as wanted, or where it takes no more than SHARE of a GPU's free memory."""
        if wanted and not isinstance(source, ArraySource):
            raise UserError("this data set is read sample by sample: it cannot stay on the device", "data.resident=true", "leave it out")
        if not isinstance(source, ArraySource) or wanted is False or (wanted is None and not self._has_room(source.x.nbytes)):
            return False
        self._held = torch.from_numpy(np.array(source.x)).to(self.device), torch.from_numpy(source.y.copy()).to(self.device)
        return True

    def to_device(self, batch: Batch) -> Batch:
        """Images as uint8 (n, C, H, W) on the device, changed as "drawn" says; weights and shares as numbers of the model's type.

        With "rows" in the place of "x" and "y" the samples come from the set that is held; "rows2" are the other ones of a mixture.
        """
        if self._side is None:
            return self._put(batch)
        with torch.cuda.stream(self._side):
            return self._put(batch) | {"ready": self._side.record_event()}

    def arrived(self, batch: Batch) -> Batch:
        """The batch, on the stream that trains."""
        ready = batch.pop("ready", None)
        if ready is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(ready)
            for tensor in batch.values():
                tensor.record_stream(here)
        return batch

    def images(self, batch: Batch) -> torch.Tensor:
        """x / 255, less its mean, over its deviation."""
        return (batch["x"].to(self._dtype) / 255.0 - self._mean) / self._std

    def _put(self, batch: Batch) -> Batch:
        there = (
            self._gathered(batch) if "rows" in batch else {"y": self._move(batch["y"])} | self._moved(batch, "x") | self._moved(batch, "x2")
        )
        there |= {name: self._move(batch[name]) for name in ("y2",) if name in batch}
        augmentation = {name: batch[name] for name in ("drawn", "drawn2") if name in batch}
        if augmentation or "x2" in there:
            there = augment.augment_batch(there | augmentation | {name: batch[name] for name in ("share",) if name in batch})
        there |= {name: self._move(batch[name]).to(self._dtype) for name in ("w", "share") if name in batch}
        if not self._channels_last:
            there["x"] = there["x"].clone(memory_format=torch.contiguous_format)  # .contiguous() leaves one channel's strides as they are
        return there

    def _moved(self, batch: Batch, name: str) -> Batch:
        return {name: self._move(batch[name]).permute(0, 3, 1, 2)} if name in batch else {}  # (n, C, H, W), in channels_last order

    def _gathered(self, batch: Batch) -> Batch:
        assert self._held is not None
        x, y = self._held
        there: Batch = {}
        for rows, image, label in (("rows", "x", "y"), ("rows2", "x2", "y2")):
            if rows in batch:
                where = self._move(batch[rows])
                there |= {image: x.index_select(0, where).permute(0, 3, 1, 2), label: y.index_select(0, where)}
        return there

    def _move(self, array: np.ndarray) -> torch.Tensor:
        """A tensor of the array's numbers, which the caller does not use any more."""
        tensor = torch.from_numpy(array)
        return tensor if self._side is None else tensor.pin_memory().to(self.device, non_blocking=True)

    def _has_room(self, size: int) -> bool:
        return self.device.type == "cuda" and size <= SHARE * torch.cuda.mem_get_info(self.device)[0]


def channels_last(asked: bool | None, own_class: bool, model: torch.nn.Module, device: torch.device) -> bool:
    """Whether images come with their channels innermost: by default to all but a class of the user's own, which may view them flat.

    On a GPU the weights of convolutions lie so too; a CPU's library keeps them in an order of its own.
    """
    wanted = not own_class if asked is None else asked
    if wanted and device.type == "cuda":
        whole: Any = model
        whole.to(memory_format=torch.channels_last)
    return wanted
