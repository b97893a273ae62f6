"""How a torch model's samples reach the device: copied ahead of need, or gathered from a data set
that stays there."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hvdtrain.comm.staging import KINDS
from hvdtrain.core.arrays import Batch
from hvdtrain.data.source import Source, arrays_in_memory
from hvdtrain.errors import UserError
from hvdtrain.tasks.task import Task

_AUGMENTATION = ("augmentation", "partner_augmentation", "mixup_weight", "cutmix_box")
SHARE = 0.25  # share of a GPU's free memory that a data set may take


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device, augmented. len() is its samples."""

    samples: int
    weight: float  # the sum of Task.weight()
    # The fields of the samples, images as uint8 (n, C, H, W). If they apply, also "w" and
    # "mixup_weight" (n,) in the model's dtype, and the fields of the partners in a mixture, such as
    # "partner_y".
    arrays: dict[str, torch.Tensor]
    copied: torch.Event | None = None  # the copy to a GPU is over

    def __len__(self) -> int:
        return self.samples


def split_batch(batch: DeviceBatch, count: int) -> list[DeviceBatch]:
    """Splits a batch into `count` parts in the order of samples. Parts may be empty; their weight
    is not set."""
    edges = [len(batch) * i // count for i in range(count + 1)]
    return [samples_of(batch, slice(start, stop)) for start, stop in itertools.pairwise(edges)]


def samples_of(batch: DeviceBatch, rows: slice) -> DeviceBatch:
    """Returns some samples of a batch, possibly none; their weight is not set."""
    arrays = {name: array[rows] for name, array in batch.arrays.items()}
    return dataclasses.replace(
        batch, samples=len(range(batch.samples)[rows]), weight=0, arrays=arrays
    )


class Inputs:
    """Inputs of one rank. to_device() may be called from threads other than the training thread; on
    a GPU it uses a separate stream."""

    def __init__(
        self, task: Task, device: torch.device, dtype: torch.dtype, channels_last: bool
    ) -> None:
        self.device = device
        self._task = task
        self._dtype = dtype
        self._channels_last = channels_last
        self._images = {
            name
            for name, field in task.fields.items()
            if field.dtype == "uint8" and len(field.shape) == 3
        }
        self._cached: dict[
            str, torch.Tensor
        ] = {}  # by field, the whole training set; images are (n, H, W, C)
        self._gpus = torch.get_device_module(device) if device.type in KINDS else None
        self._copy_stream = self._gpus.Stream(device) if self._gpus else None

    def cache_on_device(self, source: Source, wanted: bool | None) -> bool:
        """Copies the set to the device if data.resident asks for it, or if it takes at most SHARE
        of a GPU's free memory; returns whether it did.

        Raises UserError if it is wanted for a data set that is read sample by sample, or whose
        samples have different weights.
        """
        whole = arrays_in_memory(source)
        arrays = None if whole is None else {name: whole[name] for name in self._task.fields}
        if wanted and arrays is None:
            raise UserError(
                "this data set is read sample by sample: it cannot stay on the device",
                "data.resident=true",
                "leave it out",
            )
        if wanted and self._task.sample_weight is None:
            what = (
                "the host counts the tokens or labels of each batch, so the data set cannot stay "
                "only on the device"
            )
            raise UserError(what, "data.resident=true", "leave it out")
        if arrays is None or wanted is False or self._task.sample_weight is None:
            return False
        if wanted is None and not self._has_room(sum(array.nbytes for array in arrays.values())):
            return False
        self._cached = {
            name: torch.from_numpy(np.array(array)).to(self.device)
            for name, array in arrays.items()
        }
        return True

    def to_device(self, batch: Batch) -> DeviceBatch:
        """Returns the batch on the device, augmented by "augmentation" and "partner_augmentation".

        If the batch has "indices" instead of the fields, the samples come from the cached set;
        with "partner_indices", so do their partners in a mixture.
        """
        if self._gpus is None or self._copy_stream is None:
            return self._device_batch(batch)
        # in a new thread it is GPU 0, where leaving the stream would create a context
        self._gpus.set_device(self.device)
        with self._gpus.stream(self._copy_stream):
            return dataclasses.replace(
                self._device_batch(batch), copied=self._copy_stream.record_event()
            )

    def arrays(self, batch: DeviceBatch) -> dict[str, torch.Tensor]:
        """Returns the batch's arrays for the training stream. The stream, not the host, waits for
        the copy, and their memory is kept until it was read."""
        if batch.copied is not None and self._gpus is not None:
            stream = self._gpus.current_stream(self.device)
            stream.wait_event(batch.copied)
            for tensor in batch.arrays.values():
                tensor.record_stream(stream)
        return batch.arrays

    def zeros(self, samples: int) -> DeviceBatch:
        """Returns samples of zeros without padding, in the memory format of to_device()."""
        fields = self._task.fields.items()
        arrays = {
            name: torch.full(
                (samples, *field.shape),
                field.is_mask,
                dtype=getattr(torch, field.dtype),
                device=self.device,
            )
            for name, field in fields
        }
        arrays = self._contiguous(
            {name: self._in_order(name, tensor) for name, tensor in arrays.items()}
        )
        return DeviceBatch(samples, samples * (self._task.sample_weight or 1), arrays)

    def _device_batch(self, batch: Batch) -> DeviceBatch:
        arrays = self._gather_cached(batch) if "indices" in batch else self._copy_fields(batch)
        samples = len(next(iter(arrays.values())))
        augmentation: Batch = {name: batch[name] for name in _AUGMENTATION if name in batch}
        if augmentation:
            from hvdtrain.frameworks.torch import augment

            arrays |= {"x": augment.augment_batch(augmentation | arrays)["x"]}
            arrays.pop("partner_x", None)
        arrays = self._contiguous(arrays)
        arrays |= {
            name: self._copy(batch[name]).to(self._dtype)
            for name in ("w", "mixup_weight")
            if name in batch
        }
        each = self._task.sample_weight
        return DeviceBatch(
            samples, self._task.weight(batch) if each is None else samples * each, arrays
        )

    def _copy_fields(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Copies the batch's fields and the partners' fields; images as uint8 (n, C, H, W) in
        channels_last order."""
        names = [f"{prefix}{name}" for prefix in ("", "partner_") for name in self._task.fields]
        return {
            name: self._in_order(name, self._copy(batch[name])) for name in names if name in batch
        }

    def _gather_cached(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Returns tensors of the samples "indices" and "partner_indices" of the cached set."""
        arrays = {}
        for indices, prefix in (("indices", ""), ("partner_indices", "partner_")):
            if indices in batch:
                index = self._copy(batch[indices])
                for name in self._task.fields:
                    arrays[prefix + name] = self._in_order(
                        name, self._cached[name].index_select(0, index)
                    )
        return arrays

    def _in_order(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return (
            tensor.permute(0, 3, 1, 2) if name.removeprefix("partner_") in self._images else tensor
        )

    def _contiguous(self, arrays: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns contiguous images, unless they should be in channels_last order."""
        if self._channels_last:
            return arrays
        # .contiguous() would not change the strides of a single channel
        return arrays | {
            name: arrays[name].clone(memory_format=torch.contiguous_format) for name in self._images
        }

    def _copy(self, array: np.ndarray) -> torch.Tensor:
        """Returns a tensor of the array's numbers; the caller must not use the array afterwards."""
        tensor = torch.from_numpy(array)
        return (
            tensor if self._gpus is None else tensor.pin_memory().to(self.device, non_blocking=True)
        )

    def _has_room(self, size: int) -> bool:
        if self._gpus is None:
            return False
        return size <= SHARE * int(self._gpus.mem_get_info(self.device)[0])


def use_channels_last(
    asked: bool | None,
    is_users_class: bool,
    model: torch.nn.Module,
    device: torch.device,
    sharded: bool,
) -> bool:
    """Whether images are in channels_last order: by default for all models except a user's class,
    which may flatten them by view().

    On a GPU, the weights of convolutions are also converted to that order. A CPU library uses its
    own order, and the rows of a `sharded` model keep theirs.
    """
    wanted = not is_users_class if asked is None else asked
    if wanted and device.type in KINDS and not sharded:
        untyped: Any = model  # torch's overloads of to() lack one with only memory_format
        untyped.to(memory_format=torch.channels_last)
    return wanted
