"""Counts of a script's mean losses, in samples or other items, and parts of a batch that add
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdtrain.errors import UserError
from hvdtrain.frameworks.user_loop import Divisor, Samples, item_count

_MOST_NODES = 64  # maximum number of graph nodes behind a loss that are searched
# nodes that torch's cross_entropy() creates in the graph
_OF_MEANS = (
    "NllLossBackward",
    "NllLoss2DBackward",
)
_MEAN = 1  # torch's number of reduction="mean"


class Accumulated:
    """Accumulates the mean loss of a batch over its parts. loss_of(part) returns the mean of a
    part, or a pair of the mean and its count."""

    def __init__(
        self, loss_of: Callable[[Samples], Any], divisor: Divisor, device: torch.device
    ) -> None:
        self._loss_of = loss_of
        self._divisor = divisor
        self.total = torch.zeros((), device=device)  # sum of losses times weights
        self.weight = 0.0  # of all parts, in samples or items
        self.is_counted: bool | None = None  # known once a part was computed

    def of_part(self, part: Samples) -> tuple[torch.Tensor, float]:
        """Returns the loss and its weight. Raises UserError if it is not a mean loss, or if only
        some parts have a count."""
        where = "ctx.accumulate()"
        found = self._loss_of(part)
        is_counted = isinstance(found, tuple) and len(found) == 2
        loss, count = found if is_counted else (found, part.count)
        check_loss(loss, where)
        if not is_counted:
            self._divisor.need_count(where, "return loss, N in loss_of(part)")
        if self.is_counted not in (None, is_counted):
            raise UserError(
                "loss_of(part) returns a count for some parts and none for others",
                where,
                "return loss, N for each part",
            )
        self.is_counted = is_counted
        weight = item_count(count, where) if is_counted and part.count else float(part.count)
        if weight:  # the mean over nothing may be NaN
            self.total = self.total + loss.detach().sum() * weight
        self.weight += weight
        return loss, weight


class Gate:
    """A hook on the model's outputs: a part with count 0 has a zero gradient, also if its loss is 0
    / 0."""

    def __init__(self) -> None:
        self.is_open = True
        self._on_leaves: list[RemovableHandle] = []  # parameters, which outlive the part

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if self.is_open else torch.zeros_like(gradient)

    def watch(self, outputs: Any) -> None:
        """outputs: what a call of the model returned: tensors, also in containers."""
        for tensor in _tensors(outputs):
            if not tensor.requires_grad:
                continue
            handle = tensor.register_hook(self)
            if tensor.is_leaf:
                self._on_leaves.append(handle)

    def leave(self) -> None:
        """Called after the backward pass of a part."""
        for handle in self._on_leaves:
            handle.remove()
        self._on_leaves.clear()


class Watch:
    """The forward hook of a prepared model: its outputs have the gate of the part under way. A
    copied or loaded model has one without a gate, which does nothing."""

    def __init__(self) -> None:
        self._gate: Gate | None = None

    def __call__(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if self._gate is not None and torch.is_grad_enabled():
            self._gate.watch(outputs)

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()

    def begin_part(self) -> None:
        """Called when the next part begins, or after the previous part's backward pass."""
        if self._gate is not None:
            self._gate.leave()
        self._gate = Gate()

    def set_counted(self, is_counted: bool) -> None:
        """Sets whether the current part counts anything."""
        assert self._gate is not None
        self._gate.is_open = is_counted


def _tensors(outputs: Any) -> Iterator[torch.Tensor]:
    if isinstance(outputs, torch.Tensor):
        yield outputs
    elif isinstance(outputs, (Mapping, tuple, list)):
        for one in outputs.values() if isinstance(outputs, Mapping) else outputs:
            yield from _tensors(one)


def check_loss(loss: Any, where: str) -> None:
    """Raises UserError for a loss without a gradient, or with more than one number."""
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, torch.Tensor)
            else f"a {type(loss).__name__}"
        )
        found += (
            " without a gradient" if isinstance(loss, torch.Tensor) and loss.numel() == 1 else ""
        )
        raise UserError(
            f"the loss is {found}",
            where,
            "one number that depends on the model: the mean over this rank's samples",
        )


def check_mean_over_samples(loss: torch.Tensor, where: str, fix: str) -> None:
    """Raises UserError for a cross_entropy() that divides by something else than the number of its
    targets: ignore_index, weight.

    The host waits for the device.
    """
    for node in _nodes(loss):
        if not node.name().startswith(_OF_MEANS) or node._saved_reduction != _MEAN:
            continue
        targets = node._saved_target.numel()
        weight = node._saved_total_weight  # rounded to the type of the logits
        if weight != torch.tensor(targets, dtype=weight.dtype):
            what = (
                f"cross_entropy divides by {float(weight):g} here, not by its {targets} targets, "
                "because of ignore_index or weight="
            )
            raise UserError(
                f"{what}, so weighting ranks and parts by samples would give a different mean",
                where,
                fix,
            )


def _nodes(loss: torch.Tensor) -> Iterator[Any]:
    """Yields the nodes of the graph next to the loss, breadth first."""
    nodes: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes += [one for one, _ in node.next_functions]
