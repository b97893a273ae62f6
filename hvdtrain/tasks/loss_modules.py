"""Converts a loss module of torch.nn to a loss of each sample, or raises an error if its mean is
not the mean over samples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hvdtrain.data.field import Field
from hvdtrain.errors import UserError
from hvdtrain.tasks.user_functions import (
    UserLoss,
)

# Losses whose mean is over all elements. It equals the mean over samples of each sample's mean over
# its elements.
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
# losses whose mean is over the targets that are not ignore_index
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
) -> UserLoss:
    """Returns a loss of each sample, called with the model's outputs and y; a module without
    `reduction` is called with outputs and batch.

    never: whether it is known that no target has this value. sample_of: names the first sample with
    a given target, for messages. Raises UserError if its mean over a batch is not the mean of one
    number for each sample.
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
        return UserLoss(loss, facts)
    if "y" not in fields:
        what = f"loss={name} compares outputs with y, but the data only have {', '.join(fields)}"
        raise UserError(what, where, "a function loss(outputs, batch), which can use any field")
    _refuse_padded_targets(loss, name, fields["y"], where)
    if reduction == "none":
        return UserLoss(_OfTargets(loss, "none", sample_of), facts)
    # a subclass may compute something else
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
        return UserLoss(_OfTargets(each, "sum", sample_of), facts, ignore=int(loss.ignore_index))  # type: ignore[arg-type]
    return UserLoss(_OfTargets(each, "mean", sample_of), facts)


def _refuse_padded_targets(loss: nn.Module, name: str, y: Field, where: str) -> None:
    """Raises UserError if a loss would treat padding as targets: only losses whose ignore_index is
    the padding exclude it."""
    if y.padding is None:
        return
    is_of_classes = isinstance(loss, _OF_CLASSES) and loss.reduction == "mean"
    if not is_of_classes or y.padding.value != loss.ignore_index:
        what = f"loss={name} would treat the padding of y, {y.padding.value:g}, as targets"
        fix = f"data.pad={{y: {loss.ignore_index}}}, its ignore_index; or " if is_of_classes else ""
        raise UserError(
            what,
            where,
            f"{fix}a function loss(outputs, batch) that weights by batch[{y.padding.mask!r}]",
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
    """A loss of torch.nn with reduction="none" on outputs and y; it sums or averages over the
    values of a sample."""

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
            fix = "let the model return y's shape: outputs.squeeze(1) for one number per sample"
            raise UserError(
                f"loss={self.name} compares {shapes}, which torch would broadcast",
                "hvdtrain.train(), loss",
                fix,
            )
        try:
            losses: torch.Tensor = self.loss(
                outputs, y if not isinstance(self.loss, _SAME_SHAPE) else y.to(outputs.dtype)
            )
        except IndexError:
            self._refuse_label(outputs, y)
            raise
        if self.rest == "none" or losses.ndim <= 1:
            return losses
        rows = losses.flatten(1)
        return rows.sum(1) if self.rest == "sum" else rows.mean(1)

    def _refuse_label(self, outputs: Any, y: torch.Tensor) -> None:
        """Raises UserError for a target that is not a class."""
        if isinstance(self.loss, _OF_CLASSES) and outputs.ndim > 1 and not y.is_floating_point():
            classes = outputs.shape[1]
            ignored = int(self.loss.ignore_index)  # type: ignore[arg-type]
            wrong = y[((y < 0) | (y >= classes)) & (y != ignored)].flatten().tolist()
            if wrong:
                takes = (
                    f"loss={self.name} of a model with {classes} outputs takes 0 to {classes - 1}"
                )
                what = f"{self.sample_of(wrong[0])} has {wrong[0]} in y, but {takes}"
                fix = (
                    "y - 1 if labels begin at 1, a model with more outputs, or "
                    f"ignore_index={wrong[0]} for samples without a class"
                )
                raise UserError(what, "hvdtrain.train(), loss", fix)
