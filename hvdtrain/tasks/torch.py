"""Tasks in torch: the model's inputs, and the loss and the terms of the metrics of each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn import functional

from hvdtrain.data.packed import ANSWERS, SEGMENTS, TOKENS
from hvdtrain.errors import UserError
from hvdtrain.tasks.label_counts import LossForm, Operations, right_terms
from hvdtrain.tasks.points import Points
from hvdtrain.tasks.task import DeviceAndDtype, Each, TaskPart, outputs_of
from hvdtrain.tasks.transform import Transform

Tensors = Mapping[str, torch.Tensor]
NOT_PREDICTED = -100  # a target that the loss ignores
OPTIONAL = "?"  # begins the name of an input that only models with a parameter of that name get


class TorchInputs:
    """Computes the model's input from x of a batch, images uint8 (n, C, H, W): (n, ...), single
    numbers (n, 1)."""

    def __init__(self, transform: Transform, place: DeviceAndDtype, users_model: bool) -> None:
        self._dtype = place.dtype
        self.is_of_images = transform.is_of_images  # (n, C, H, W)
        self._largest = 255.0 if transform.is_of_images else 1.0
        self._is_changed = transform.is_of_images or transform.is_standardized
        self._fill = (
            None
            if transform.fill is None
            else torch.tensor(
                transform.along(transform.fill), dtype=place.dtype, device=place.device
            )
        )
        self._keeps_integers = users_model
        self._mean, self._std = (
            torch.tensor(array, dtype=place.dtype, device=place.device)
            for array in map(_along(transform), (transform.mean, transform.std))
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None] if x.ndim == 1 else x
        if self._fill is not None:
            x = torch.where(x.isnan(), self._fill, x.to(self._dtype))
        if self._is_changed:
            return (x.to(self._dtype) / self._largest - self._mean) / self._std
        return as_given(x, self._dtype) if self._keeps_integers else x.to(self._dtype)

    def named(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """Returns the model's input as a dict, by the name of x."""
        return {"x": self(batch["x"])}


def _along(transform: Transform) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function that shapes mean and std for x in torch, images (n, C, H, W)."""
    if transform.is_of_images:
        return lambda stats: stats.reshape(1, -1, 1, 1)
    return transform.along


class TorchFields:
    """Computes the model's inputs from several fields of a batch, as a dict."""

    def __init__(self, transforms: Mapping[str, Transform], place: DeviceAndDtype) -> None:
        self._each = {
            name: TorchInputs(transform, place, users_model=True)
            for name, transform in transforms.items()
        }

    def named(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """Returns (n, ...) each"""
        return {name: inputs(batch[name]) for name, inputs in self._each.items()}


class TorchOfFields:
    """Wraps another part for a model that is called with several fields."""

    def __init__(self, part: TaskPart, fields: TorchFields) -> None:
        self.inputs = fields.named
        self.outputs_of = outputs_of(part)
        self.each = part.each


def as_given(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts floats to the model's dtype and integers to int64; uint8 images (n, C, H, W) are not
    changed."""
    if tensor.is_floating_point():
        return tensor.to(dtype)
    is_image = tensor.dtype == torch.uint8 and tensor.ndim == 4
    return tensor if tensor.dtype == torch.bool or is_image else tensor.long()


# names of the main output in torchvision's segmentation nets and transformers' models
MAIN_OUTPUTS = (
    "out",
    "logits",
)


def main_output(outputs: Any) -> Any:
    """Returns the tensor that the loss uses: the first of a tuple; "out", "logits" or the only
    value of a dict.

    Raises UserError for any other dict.
    """
    if isinstance(outputs, (tuple, list)) and outputs:
        return main_output(outputs[0])
    if not isinstance(outputs, Mapping) or not outputs:
        return outputs
    name = next((name for name in MAIN_OUTPUTS if name in outputs), None)
    if name is None and len(outputs) > 1:
        what = (
            f"the model returns a dict of {', '.join(map(str, outputs))}, and it is unknown which "
            "of them to train"
        )
        raise UserError(
            what,
            "model.name",
            f"a model that returns a tensor, or calls it {' or '.join(MAIN_OUTPUTS)}",
        )
    return main_output(outputs[next(iter(outputs)) if name is None else name])


def as_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Converts to a tensor on the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)


class TorchClassification:
    """Images are uint8 (n, C, H, W), other numbers (n, ...); logits (n, outputs), at least one for
    each class."""

    where = staticmethod(torch.where)  # of this framework

    def __init__(self, inputs: TorchInputs, form: LossForm, place: DeviceAndDtype) -> None:
        self._inputs = inputs
        self._form = form
        self.operations = _scored_operations(place)
        weights = form.class_weights
        self._weights = (
            None
            if weights is None
            else torch.tensor(weights, dtype=place.dtype, device=place.device)
        )

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        """Computes the loss and sums of each sample; with mixup, weight x L(label) + (1 - weight) x
        L(partner's label) (Zhang et al. 2017, arXiv:1710.09412)."""
        outputs = main_output(outputs)
        loss = self._of_labels(outputs, batch["y"], training)
        if "mixup_weight" in batch:
            weight = batch["mixup_weight"].to(loss.dtype)
            loss = weight * loss + (1.0 - weight) * self._of_labels(
                outputs, batch["partner_y"], training
            )
        return Each(loss, right_terms(outputs.detach(), batch["y"], self._form.top_k))

    def _of_labels(
        self, logits: torch.Tensor, labels: torch.Tensor, training: bool
    ) -> torch.Tensor:
        """Returns the losses (n,), multiplied by the class weights of the labels."""
        loss = self._unweighted(logits, labels, training)
        return loss if self._weights is None else loss * self._weights[labels]

    def _unweighted(
        self, logits: torch.Tensor, labels: torch.Tensor, training: bool
    ) -> torch.Tensor:
        """Returns the losses (n,). In training with label smoothing e: (1 - e) CE + e x mean over
        classes of -log p; in validation CE."""
        smoothing = self._form.smoothing if training else 0.0
        if self._form.squared_error:
            target = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
            target = target * (1.0 - smoothing) + smoothing / logits.shape[1]
            return 0.5 * (logits - target).square().sum(1)
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def _scored_operations(place: DeviceAndDtype) -> Operations:
    """Returns the operations of task.metrics on tensors. Scores are float64 on the host."""
    return Operations(
        lambda array: torch.from_numpy(array).to(place.device),
        lambda outputs: main_output(outputs).detach(),
        lambda logits: logits.softmax(1).amax(1),
        lambda tensor: tensor.cpu().numpy(),
        # the tensors of a memory prediction have no values
        can_copy=lambda logits: len(logits) > 0 and type(logits).__name__ != "FakeTensor",
    )


class TorchRegression:
    """Outputs (n, outputs), or maps in the layout of y or (n, C, H, W); targets of any shape with
    as many numbers. Images are uint8 (n, C, H, W)."""

    def __init__(
        self,
        inputs: TorchInputs,
        points: Points,
        target_mean: np.ndarray,
        place: DeviceAndDtype,
        *,
        of_maps: bool,
    ) -> None:
        """of_maps: whether the model maps (n, C, H, W) to (n, C, H, W)."""
        self._inputs = inputs
        self._points = points
        self._target_mean = torch.tensor(target_mean, dtype=place.dtype, device=place.device)
        self._of_maps = of_maps
        weights = points.point_weights
        self._weights = (
            None
            if weights is None
            else torch.tensor(weights, dtype=place.dtype, device=place.device)
        )

    def inputs(self, batch: Tensors) -> torch.Tensor:
        x = self._inputs(batch["x"])
        maps = self._points.maps
        if maps is None or not self._of_maps or self._inputs.is_of_images:
            return x
        return maps.as_input(x, "first")

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        of_y = self.outputs_of(main_output(outputs))
        of_y = of_y.reshape(len(of_y), *self._points.shape)
        target = batch["y"].to(self._target_mean.dtype)
        return self._points.each(of_y, target, self._target_mean, torch, self._weights)

    def outputs_of(self, found: Any) -> Any:
        """Converts maps to the layout of y; anything else is not changed."""
        maps = self._points.maps
        is_of_y = tuple(found.shape[1:]) == self._points.shape and not self._of_maps
        if maps is None or is_of_y or found.ndim != 4:
            return found
        return maps.in_layout_of_y(found, "first")


class CutLogits(Protocol):
    """Logits partitioned by vocabulary among the ranks that compute each layer together."""

    def cross_entropy(self, targets: torch.Tensor, smoothing: float, ignore: int) -> torch.Tensor:
        """Returns the cross entropy of each target, (n, T), like functional.cross_entropy() with
        reduction="none"."""


class TorchLanguage:
    """Tokens (n, T + 1); logits (n, T, outputs), at least one for each token of the vocabulary."""

    def __init__(
        self,
        ignore: int | None,
        smoothing: float,
        mask: str | None = None,
        packed: bool = False,
        of_answers: bool = False,
    ) -> None:
        self._ignore = ignore
        self._smoothing = smoothing
        self._mask = mask
        self._of_answers = of_answers
        # inputs that are passed to the model by name
        self.by_name = (TOKENS, SEGMENTS) if packed else ()

    def inputs(self, batch: Tensors) -> torch.Tensor | dict[str, torch.Tensor]:
        """Returns int64 (n, T), and by name the segments of packed rows, or optionally the mask of
        padded ones. Padding below 0 is not a token; the model gets 0 there."""
        tokens = batch["tokens"][:, :-1].long()
        if self._mask is not None:
            mask = batch[self._mask][:, :-1]
            tokens = tokens.masked_fill(~mask & (tokens < 0), 0)
            return {TOKENS: tokens, f"{OPTIONAL}{self._mask}": mask}
        return {TOKENS: tokens, SEGMENTS: batch[SEGMENTS][:, :-1]} if self.by_name else tokens

    def each(self, outputs: torch.Tensor | CutLogits, batch: Tensors, training: bool) -> Each:
        if not hasattr(outputs, "cross_entropy"):  # otherwise CutLogits, which is also a tuple
            outputs = main_output(outputs)
        targets = batch["tokens"][:, 1:].long()  # (n, T)
        if self._ignore is not None:
            targets = targets.masked_fill(targets == self._ignore, NOT_PREDICTED)
        if self._mask is not None:
            targets = targets.masked_fill(~batch[self._mask][:, 1:], NOT_PREDICTED)
        if self.by_name:
            segments = batch[SEGMENTS]
            targets = targets.masked_fill(
                (segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] == 0), NOT_PREDICTED
            )
        if self._of_answers:
            targets = targets.masked_fill(~batch[ANSWERS][:, 1:], NOT_PREDICTED)
        smoothing = self._smoothing if training else 0.0
        if isinstance(outputs, torch.Tensor):
            loss = functional.cross_entropy(
                outputs.flatten(0, 1),
                targets.flatten(),
                reduction="none",
                label_smoothing=smoothing,
                ignore_index=NOT_PREDICTED,
            )
        else:
            loss = outputs.cross_entropy(targets, smoothing, NOT_PREDICTED)
        return Each(loss.view(targets.shape).sum(1), {"tokens": (targets != NOT_PREDICTED).sum(1)})
