"""Tasks in torch: x as a model gets it, the loss and the terms of the metrics of each sample; and
what functions of a script give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from hvdtrain.data.packed import SEGMENTS, TOKENS
from hvdtrain.data.source import Field
from hvdtrain.errors import UserError
from hvdtrain.tasks.inputs import Transform
from hvdtrain.tasks.label_counts import LossForm, edges_of_bins, right_terms, terms
from hvdtrain.tasks.task import Each, Part, Place
from hvdtrain.tasks.user_functions import (
    Loss,
    UserMetrics,
    is_torch_module,
    parts_of,
    terms_of,
    terms_of_no_samples,
)

Tensors = Mapping[str, torch.Tensor]


class TorchInputs:
    """x of a batch, images uint8 (n, C, H, W), as the model gets it: (n, ...), single numbers (n,
    1)."""

    def __init__(self, transform: Transform, place: Place, users_model: bool) -> None:
        by_channel = (1, -1, 1, 1) if transform.is_of_images else (-1,)
        self._dtype = place.dtype
        self._largest = 255.0 if transform.is_of_images else 1.0
        self._is_changed = transform.is_of_images or transform.is_standardized
        self._keeps_integers = users_model
        self._mean, self._std = (
            torch.tensor(array, dtype=place.dtype, device=place.device).view(by_channel)
            for array in (transform.mean, transform.std)
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None] if x.ndim == 1 else x
        if self._is_changed:
            return (x.to(self._dtype) / self._largest - self._mean) / self._std
        return as_given(x, self._dtype) if self._keeps_integers else x.to(self._dtype)

    def named(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """x of the batch as the model gets it, by its name."""
        return {"x": self(batch["x"])}


class TorchFields:
    """Several fields of a batch as the model gets them, by name."""

    def __init__(self, transforms: Mapping[str, Transform], place: Place) -> None:
        self._each = {
            name: TorchInputs(transform, place, users_model=True)
            for name, transform in transforms.items()
        }

    def named(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """(n, ...) each"""
        return {name: inputs(batch[name]) for name, inputs in self._each.items()}


class TorchOfFields:
    """Another part, whose model is called with several fields."""

    def __init__(self, part: Part, fields: TorchFields) -> None:
        self.inputs = fields.named
        self.each = part.each


def as_given(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Floats in the model's number type, integers as int64; images, whole bytes (n, C, H, W), as
    they are."""
    if tensor.is_floating_point():
        return tensor.to(dtype)
    is_image = tensor.dtype == torch.uint8 and tensor.ndim == 4
    return tensor if tensor.dtype == torch.bool or is_image else tensor.long()


# what torchvision's segmentation nets and transformers' models call it
MAIN_OUTPUTS = (
    "out",
    "logits",
)


def main_output(outputs: Any) -> Any:
    """The tensor that a task of hvdtrain's learns from: of a tuple the first, of a dict "out",
    "logits" or its only one.

    Raises UserError for a dict of several others.
    """
    if isinstance(outputs, (tuple, list)) and outputs:
        return main_output(outputs[0])
    if not isinstance(outputs, Mapping) or not outputs:
        return outputs
    name = next((name for name in MAIN_OUTPUTS if name in outputs), None)
    if name is None and len(outputs) > 1:
        what = (
            f"the model gives a dict of {', '.join(map(str, outputs))}, and which of them is "
            "learned from is not known"
        )
        raise UserError(
            what,
            "model.name",
            f"a model that gives a tensor, or names it {' or '.join(MAIN_OUTPUTS)}",
        )
    return main_output(outputs[next(iter(outputs)) if name is None else name])


def as_tensor(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """On the device of `like`."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(like.device)


class TorchClassification:
    """Images are uint8 (n, C, H, W), other numbers (n, ...); logits (n, outputs), at least one for
    each class."""

    where = staticmethod(torch.where)  # of this framework

    def __init__(self, inputs: TorchInputs, form: LossForm, place: Place) -> None:
        self._inputs = inputs
        self._form = form
        weights = form.class_weights
        self._weights = (
            None
            if weights is None
            else torch.tensor(weights, dtype=place.dtype, device=place.device)
        )

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        """With mixup weight L(label) + (1 - weight) L(partner's label) (Zhang et al. 2017,
        arXiv:1710.09412)."""
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
        """(n,), with class weights: each times that of its label."""
        loss = self._unweighted(logits, labels, training)
        return loss if self._weights is None else loss * self._weights[labels]

    def _unweighted(
        self, logits: torch.Tensor, labels: torch.Tensor, training: bool
    ) -> torch.Tensor:
        """(n,): in training with label smoothing, (1 - e) CE + e times the mean over classes of
        -log p; in validation without."""
        smoothing = self._form.smoothing if training else 0.0
        if self._form.squared_error:
            target = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
            target = target * (1.0 - smoothing) + smoothing / logits.shape[1]
            return 0.5 * (logits - target).square().sum(1)
        return functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


class TorchRegression:
    """Outputs (n, outputs); targets of any shape with as many numbers. Images are uint8 (n, C, H,
    W)."""

    def __init__(
        self, inputs: TorchInputs, target_mean: np.ndarray, loss: str, place: Place
    ) -> None:
        self._inputs = inputs
        self._loss = loss
        self._target_mean = torch.tensor(target_mean, dtype=place.dtype, device=place.device)

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        outputs = main_output(outputs)
        target = batch["y"].to(self._target_mean.dtype).reshape(outputs.shape)  # (n, outputs)
        error = outputs - target
        squares = error.square()
        absolute = error.abs()
        loss = (squares if self._loss == "squared_error" else absolute).mean(1)
        centred = (target - self._target_mean).double()
        terms = {
            "squares": squares.double().mean(1),
            "absolute": absolute.double().mean(1),
            "residual": squares.double(),
            "target": centred,
            "target_square": centred.square(),
        }
        return Each(loss, terms)


class TorchMultilabel:
    """Logits (n, labels), y uint8 (n, labels). Images are uint8 (n, C, H, W)."""

    def __init__(self, inputs: TorchInputs, bins: int, place: Place) -> None:
        self._inputs = inputs
        lower, upper = (
            torch.tensor(edges, dtype=torch.float64, device=place.device)
            for edges in edges_of_bins(bins)
        )
        self._edges = lower, upper

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        outputs = main_output(outputs)
        loss = functional.binary_cross_entropy_with_logits(
            outputs, batch["y"].to(outputs.dtype), reduction="none"
        ).mean(1)
        logits = outputs.detach()
        return Each(loss, terms(logits, logits.sigmoid(), batch["y"] > 0, self._edges))


class TorchSegmentation:
    """Logits (n, classes, H, W), or several outputs of which main_output() is that; y (n, H, W).
    Images are uint8 (n, C, H, W)."""

    def __init__(
        self,
        inputs: TorchInputs,
        classes: int,
        ignored: int | None,
        dice: float,
        weights: Sequence[float] | None,
    ) -> None:
        self._inputs = inputs
        self._classes = classes
        self._ignored = ignored
        self._dice = dice
        self._weights = None if weights is None else torch.tensor(weights, dtype=torch.float64)

    def inputs(self, batch: Tensors) -> torch.Tensor:
        return self._inputs(batch["x"])

    def each(self, outputs: torch.Tensor, batch: Tensors, training: bool) -> Each:
        outputs = main_output(outputs)
        y = batch["y"].long()
        y = y if self._ignored is None else y.masked_fill(y == self._ignored, _NONE)
        counts = y != _NONE  # (n, H, W)
        pixels = counts.flatten(1).sum(1)
        weights = None if self._weights is None else self._weights.to(outputs.device, outputs.dtype)
        loss = (
            functional.cross_entropy(outputs, y, weights, reduction="none", ignore_index=_NONE)
            .flatten(1)
            .sum(1)
        )
        if self._dice:
            loss = loss + self._dice * pixels.to(loss.dtype) * (
                1.0 - self._dice_of_each(outputs, y, counts)
            )
        return Each(loss, {"pixels": pixels, "confusion": self._confusion(outputs, y, counts)})

    def _dice_of_each(
        self, outputs: torch.Tensor, y: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """(n,): 2 sum(p g) / (sum(p) + sum(g)) over pixels, the mean over the classes that a sample
        has."""
        shares = (outputs.softmax(1) * counts[:, None]).flatten(2)  # (n, classes, H W)
        is_there = (
            functional.one_hot(y.clamp(min=0), self._classes).movedim(3, 1).flatten(2)
            * counts.flatten(1)[:, None]
        )
        area = is_there.sum(2)  # (n, classes)
        each = 2.0 * (shares * is_there).sum(2) / (shares.sum(2) + area).clamp(min=1e-30)
        return torch.where(area > 0, each, 0.0).sum(1) / (area > 0).sum(1).clamp(min=1)

    def _confusion(
        self, outputs: torch.Tensor, y: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """int64 (n, classes ** 2): pixels by [label, said]."""
        cells = self._classes**2
        of_sample = cells * torch.arange(len(y), device=y.device)[:, None, None]
        cell = of_sample + self._classes * y + outputs.detach().argmax(1)
        return torch.bincount(cell[counts], minlength=len(y) * cells).view(len(y), cells)


_NONE = -100  # a target that is not predicted


class CutLogits(Protocol):
    """Logits of which each tensor rank has those of a part of the vocabulary
    (frameworks/torch/parallel/tensor/collectives.py)."""

    def cross_entropy(self, targets: torch.Tensor, smoothing: float, ignore: int) -> torch.Tensor:
        """Cross entropy of each target, as functional.cross_entropy() with reduction="none"; (n,
        T)"""


class TorchLanguage:
    """Tokens (n, T + 1); logits (n, T, outputs), at least one for each token of the vocabulary."""

    def __init__(
        self, ignore: int | None, smoothing: float, mask: str | None = None, packed: bool = False
    ) -> None:
        self._ignore = ignore
        self._smoothing = smoothing
        self._mask = mask
        # inputs that a model has to take by their names
        self.by_name = (TOKENS, SEGMENTS) if packed else ()

    def inputs(self, batch: Tensors) -> torch.Tensor | dict[str, torch.Tensor]:
        """int64 (n, T), and the segments of packed rows by name; padding below 0 is no token, and a
        model gets 0 there."""
        tokens = batch["tokens"][:, :-1].long()
        if self._mask is not None:
            tokens = tokens.masked_fill(~batch[self._mask][:, :-1] & (tokens < 0), 0)
        return {TOKENS: tokens, SEGMENTS: batch[SEGMENTS][:, :-1]} if self.by_name else tokens

    def each(self, outputs: torch.Tensor | CutLogits, batch: Tensors, training: bool) -> Each:
        if not hasattr(outputs, "cross_entropy"):  # else CutLogits, which is a tuple too
            outputs = main_output(outputs)
        targets = batch["tokens"][:, 1:].long()  # (n, T)
        if self._ignore is not None:
            targets = targets.masked_fill(targets == self._ignore, _NONE)
        if self._mask is not None:
            targets = targets.masked_fill(~batch[self._mask][:, 1:], _NONE)
        if self.by_name:
            segments = batch[SEGMENTS]
            targets = targets.masked_fill(
                (segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] == 0), _NONE
            )
        smoothing = self._smoothing if training else 0.0
        if isinstance(outputs, torch.Tensor):
            loss = functional.cross_entropy(
                outputs.flatten(0, 1),
                targets.flatten(),
                reduction="none",
                label_smoothing=smoothing,
                ignore_index=_NONE,
            )
        else:
            loss = outputs.cross_entropy(targets, smoothing, _NONE)
        return Each(loss.view(targets.shape).sum(1), {"tokens": (targets != _NONE).sum(1)})


class TorchFunctions:
    """A loss (outputs, batch) -> (n,)."""

    def __init__(self, loss: Loss, inputs: TorchInputs | TorchFields, place: Place) -> None:
        self._loss = loss
        self._inputs = inputs
        self._place = place
        self._of = (
            copy.deepcopy(loss.of).to(place.device, place.dtype)  # type: ignore[attr-defined]
            if is_torch_module(loss.of)
            else loss.of
        )

    def of_fields(self, fields: TorchFields) -> TorchFunctions:
        """This loss, of a model that is called with several fields."""
        return TorchFunctions(self._loss, fields, self._place)

    def inputs(self, batch: Tensors) -> Any:
        named = self._inputs.named(batch)
        return named if isinstance(self._inputs, TorchFields) else named["x"]

    def batch_for_user(self, batch: Tensors) -> dict[str, torch.Tensor]:
        """All fields: those of the model as it gets them, the others by their kind."""
        named = self._inputs.named(batch)
        others = {
            name: as_given(field, self._place.dtype)
            for name, field in batch.items()
            if name not in named and name != "w"
        }
        return {**named, **others}

    def each(self, outputs: Any, batch: Tensors, training: bool) -> Each:
        loss = self._of(outputs, self.batch_for_user(batch))
        samples = len(next(iter(batch.values())))
        if not isinstance(loss, torch.Tensor) or tuple(loss.shape) != (samples,):
            raise UserError(*_not_of_each(loss, samples))
        terms = {}
        if self._loss.ignore is not None:
            terms["targets"] = (batch["y"] != self._loss.ignore).reshape(samples, -1).sum(1)
        return Each(loss.to(self._place.dtype), terms)


def _not_of_each(loss: Any, samples: int) -> tuple[str, str, str]:
    """What is wrong with a loss, where, and what to do."""
    where = "hvdtrain.train(), loss"
    if not isinstance(loss, torch.Tensor):
        return (
            f"loss gives a {type(loss).__name__}, not a tensor ({samples},)",
            where,
            "one number for each sample",
        )
    found = f"loss gives {tuple(loss.shape)} for {samples} samples, not ({samples},)"
    if not loss.ndim:
        fix = (
            "leave .mean() out, or give reduction='none': hvdtrain takes the mean over the "
            "samples of all ranks"
        )
        return f"loss gives one number for {samples} samples, not ({samples},)", where, fix
    fix = "the mean or sum over the other dimensions: .flatten(1).mean(1)"
    return found, where, fix if len(loss) == samples else "one number for each sample"


def check_alone(part: Part, outputs: Any, batch: Tensors) -> None:
    """Raises UserError where what a function gives for a sample depends on the others of its batch:
    (n, 1) less (n,) is (n, n)."""
    if not isinstance(part, (TorchFunctions, TorchMeasured)):
        return
    samples = len(next(iter(batch.values())))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        together, again = (_totals(part.each(outputs, batch, training=False)) for _ in range(2))
        alone = [
            _totals(
                part.each(
                    rows_of(outputs, slice(i, i + 1)),
                    rows_of(batch, slice(i, i + 1)),
                    training=False,
                )
            )
            for i in range(samples)
        ]
    for name, whole in together.items():
        single = (
            torch.cat([one[name] for one in alone])
            if name == "loss"
            else torch.stack([one[name] for one in alone]).sum(0)
        )
        if torch.equal(whole, again[name]) and not torch.allclose(
            whole, single, rtol=1e-3, atol=1e-6, equal_nan=True
        ):
            what = (
                "loss"
                if name == "loss"
                else f"metric {name.removesuffix('_sum').removesuffix('_count')}"
            )
            found = (
                f"of {samples} samples together it is {_short(whole)}, of each alone "
                f"{_short(single)}"
            )
            fix = (
                "a value of each sample, of its own outputs and fields: (n, 1) less (n,) is (n, "
                "n), and .squeeze() drops a batch of one"
            )
            raise UserError(
                f"{what} of a sample depends on the other samples of its batch: {found}",
                f"hvdtrain.train(), {what}",
                fix,
            )


def _totals(each: Each) -> dict[str, torch.Tensor]:
    """The loss of each sample, and the sums of metrics, which may be of the whole batch."""
    return {
        "loss": each.loss.double(),
        **{name: term.double().sum(0) for name, term in each.terms.items()},
    }


def _short(total: torch.Tensor) -> str:
    return (
        f"{total.item():.6g}"
        if total.ndim == 0
        else ", ".join(f"{number:.6g}" for number in total.tolist()[:4])
    )


def rows_of(thing: Any, rows: slice) -> Any:
    """Some samples of outputs, or of a batch: of a tensor, or of several in a tuple, a list or a
    dict."""
    if isinstance(thing, Mapping):
        return {name: rows_of(one, rows) for name, one in thing.items()}
    if isinstance(thing, (tuple, list)):
        several = (rows_of(one, rows) for one in thing)
        return type(thing)(*several) if hasattr(thing, "_fields") else tuple(several)
    return thing if thing is None else thing[rows]


class TorchMeasured:
    """A part with the terms of metrics of the user's own, and in an evaluation with what is
    gathered for them."""

    def __init__(self, part: Part, metrics: UserMetrics, place: Place) -> None:
        self._part = part
        self._metrics = metrics
        self._dtype = place.dtype
        self.inputs = part.inputs

    def each(self, outputs: Any, batch: Tensors, training: bool) -> Each:
        each = self._part.each(outputs, batch, training)
        if not len(each.loss):  # norm.kind=sync may give a rank a pass without samples
            return each._replace(
                terms={**each.terms, **terms_of_no_samples(self._metrics, each.loss.detach())}
            )
        with torch.no_grad():
            if isinstance(self._part, TorchFunctions):
                fields = self._part.batch_for_user(batch)
            else:
                fields = {
                    name: as_given(field, self._dtype)
                    for name, field in batch.items()
                    if name != "w"
                }
            own = terms_of(self._metrics, outputs, fields, len(each.loss), _rows)
            parts = {} if training else parts_of(self._metrics, outputs, fields)
        return each._replace(terms={**each.terms, **own}, parts={**each.parts, **parts})


def _rows(value: Any, samples: int, whole: bool) -> Any:
    """A tensor with a row for each sample. whole: one number of all samples counts as that of the
    first."""
    tensor = torch.as_tensor(value)
    if whole and tensor.ndim == 0:
        return torch.cat(
            [
                tensor.reshape(1).double(),
                torch.zeros(samples - 1, dtype=torch.float64, device=tensor.device),
            ]
        )
    return tensor


# Whose mean is that over all elements, so that it is the mean over samples of each sample's mean
# over its elements.
_ELEMENTWISE: tuple[type[nn.Module], ...] = (
    *(
        nn.MSELoss,
        nn.L1Loss,
        nn.SmoothL1Loss,
        nn.HuberLoss,
        nn.BCELoss,
        nn.BCEWithLogitsLoss,
        nn.SoftMarginLoss,
        nn.PoissonNLLLoss,
    ),
    *(
        nn.MultiLabelSoftMarginLoss,
        nn.MultiMarginLoss,
        nn.MultiLabelMarginLoss,
        nn.HingeEmbeddingLoss,
    ),
)
# whose mean is over the targets that are not ignore_index
_OF_CLASSES: tuple[type[nn.Module], ...] = (
    nn.CrossEntropyLoss,
    nn.NLLLoss,
)
# torch would broadcast (n, 1) and (n,) to (n, n)
_SAME_SHAPE = tuple(
    kind for kind in _ELEMENTWISE if kind not in (nn.MultiMarginLoss, nn.MultiLabelMarginLoss)
)


def of_torch_module(
    loss: nn.Module,
    where: str,
    fields: Mapping[str, Field],
    never: Callable[[int], bool],
    sample_of: Callable[[int], str],
) -> Loss:
    """The loss of each sample, called with the model's outputs and y; a module without `reduction`
    is called with outputs and batch.

    never: whether it is known that no target is that integer. sample_of: what messages call the
    first sample with a target. Raises UserError where its mean over a batch is not the mean over
    samples, or not of one number for each.
    """
    name = type(loss).__name__
    reduction = getattr(loss, "reduction", None)
    if any(p.requires_grad for p in loss.parameters()):
        raise UserError(
            f"loss={name} has parameters, which would not be trained",
            where,
            "make them parameters of the model",
        )
    facts = {
        "class": name,
        **{key: value for key, value in vars(loss).items() if _is_plain(key, value)},
    }
    if reduction is None:
        return Loss(loss, facts)
    if "y" not in fields:
        what = f"loss={name} compares outputs with y; the data have {', '.join(fields)}"
        raise UserError(what, where, "a function loss(outputs, batch), which takes any field")
    _refuse_padded_targets(loss, name, fields["y"], where)
    if reduction == "none":
        return Loss(_OfTargets(loss, "none", sample_of), facts)
    # a class that is made of one may compute something else
    known = type(loss) in (
        *_ELEMENTWISE,
        *_OF_CLASSES,
    )
    if reduction != "mean" or not known or getattr(loss, "weight", None) is not None:
        raise UserError(
            f"{_why(loss)}, so it is not a mean over samples",
            where,
            f'{name}(..., reduction="none"): its mean is taken over samples',
        )
    each = copy.deepcopy(loss)
    each.reduction = "none"  # type: ignore[assignment]
    if isinstance(loss, _OF_CLASSES) and not never(int(loss.ignore_index)):  # type: ignore[arg-type]
        return Loss(_OfTargets(each, "sum", sample_of), facts, ignore=int(loss.ignore_index))  # type: ignore[arg-type]
    return Loss(_OfTargets(each, "mean", sample_of), facts)


def _refuse_padded_targets(loss: nn.Module, name: str, y: Field, where: str) -> None:
    """Raises UserError where a loss would take padding for targets: all but those that leave out an
    integer, which is the padding."""
    if y.padding is None:
        return
    is_of_classes = isinstance(loss, _OF_CLASSES) and loss.reduction == "mean"
    if not is_of_classes or y.padding.value != loss.ignore_index:
        what = f"loss={name} would take the padding of y, {y.padding.value:g}, for targets"
        fix = f"data.pad={{y: {loss.ignore_index}}}, its ignore_index; or " if is_of_classes else ""
        raise UserError(
            what,
            where,
            f"{fix}a function loss(outputs, batch) that weighs by batch[{y.padding.mask!r}]",
        )


def _why(loss: nn.Module) -> str:
    name = type(loss).__name__
    reduction = loss.reduction
    if reduction != "mean":
        return f"loss={name} with reduction={reduction!r} depends on how many samples a batch has"
    if getattr(loss, "weight", None) is not None:
        return (
            f"loss={name} with weight divides by the weights of the batch"
            if isinstance(loss, _OF_CLASSES)
            else f"loss={name} has a weight"
        )
    return f"loss={name} with reduction='mean' may look at several samples at once"


def _is_plain(key: str, value: Any) -> bool:
    return (
        not key.startswith("_")
        and key not in ("training", "reduction")
        and (value is None or isinstance(value, (bool, int, float, str)))
    )


class _OfTargets(nn.Module):
    """A loss of torch.nn with reduction none, of outputs and y: its sum or mean over what a sample
    has several of."""

    def __init__(self, loss: nn.Module, rest: str, sample_of: Callable[[int], str]) -> None:
        super().__init__()
        self.loss = loss
        self.rest = rest
        self.sample_of = sample_of
        self.name = type(loss).__name__

    def forward(self, outputs: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        y = batch["y"]
        if isinstance(self.loss, _SAME_SHAPE) and outputs.shape != y.shape:
            shapes = f"outputs {tuple(outputs.shape)} and y {tuple(y.shape)}"
            fix = "end the model with y's shape: outputs.squeeze(1) for one number a sample"
            raise UserError(
                f"loss={self.name} compares {shapes}, which torch would broadcast",
                "hvdtrain.train(), loss",
                fix,
            )
        try:
            found: torch.Tensor = self.loss(
                outputs, y if not isinstance(self.loss, _SAME_SHAPE) else y.to(outputs.dtype)
            )
        except IndexError:
            self._refuse_label(outputs, y)
            raise
        if self.rest == "none" or found.ndim <= 1:
            return found
        rows = found.flatten(1)
        return rows.sum(1) if self.rest == "sum" else rows.mean(1)

    def _refuse_label(self, outputs: Any, y: torch.Tensor) -> None:
        """Raises UserError for a target that is no class."""
        if isinstance(self.loss, _OF_CLASSES) and outputs.ndim > 1 and not y.is_floating_point():
            classes = outputs.shape[1]
            ignored = int(self.loss.ignore_index)  # type: ignore[arg-type]
            wrong = y[((y < 0) | (y >= classes)) & (y != ignored)].flatten().tolist()
            if wrong:
                takes = (
                    f"loss={self.name} of a model with {classes} outputs takes 0 to {classes - 1}"
                )
                what = f"{self.sample_of(wrong[0])} has {wrong[0]} in y, and {takes}"
                fix = (
                    "y - 1 where labels begin at 1, a model with more outputs, or "
                    f"ignore_index={wrong[0]} for samples without a class"
                )
                raise UserError(what, "hvdtrain.train(), loss", fix)
