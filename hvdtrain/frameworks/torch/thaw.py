"""model.thaw: weights that are frozen until a step. Their gradients are cleared and their norms
stay in evaluation mode; the rule does not update them (optim/thawing.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hvdtrain.comm.mesh import Mesh
from hvdtrain.config.schema import Config
from hvdtrain.core.progress import Hyper
from hvdtrain.frameworks.by_name import thaw_entries
from hvdtrain.frameworks.torch.buffers import RUNNING
from hvdtrain.frameworks.torch.frozen import stay, ties_of
from hvdtrain.frameworks.torch.step import StepAddition
from hvdtrain.optim.thawing import ThawEntries


class Thaw(StepAddition):
    """The frozen parameters of each entry of model.thaw."""

    def __init__(self, model: nn.Module, entries: ThawEntries) -> None:
        self._entries = entries
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._norms: list[list[nn.Module]] = [[] for _ in entries.patterns]
        for name, module in model.named_modules():
            running = [
                f"{name}.{buffer}".removeprefix(".")
                for buffer in RUNNING
                if buffer in module._buffers
            ]
            numbers = {
                number for buffer in running if (number := entries.number_of(buffer)) is not None
            }
            for number in numbers:
                self._norms[number].append(module)

    def take_parts(self, updated: Sequence[torch.Tensor]) -> None:
        self._updated = [
            [
                p
                for name, p in zip(self._trained, updated, strict=True)
                if self._entries.number_of(name) == n
            ]
            for n in range(len(self._entries.patterns))
        ]
        # None: before the first step
        self._is_frozen: list[bool | None] = [None] * len(self._entries.patterns)

    def begin_step(self, hyper: Hyper) -> None:
        for number, at in enumerate(hyper.thaw):
            is_frozen = hyper.step < at
            if is_frozen is not self._is_frozen[number]:
                self._is_frozen[number] = is_frozen
                for norm in self._norms[number]:
                    stay(norm) if is_frozen else _train(norm)

    def reduced(self) -> None:
        """Clears the gradients of frozen parameters, so that no norm, measure or check of numbers
        includes them."""
        for is_frozen, parameters in zip(self._is_frozen, self._updated, strict=True):
            for p in parameters if is_frozen else ():
                if p.grad is not None:
                    p.grad.zero_()


def addition(config: Config, mesh: Mesh, model: nn.Module, parameters: list[nn.Parameter]) -> Thaw:
    """Creates it for the model."""
    return Thaw(model, thaw_entries(config.model, ties_of(model)))


def _train(norm: nn.Module) -> None:
    """Undoes stay()."""
    vars(norm).pop("train", None)
    norm.train()
