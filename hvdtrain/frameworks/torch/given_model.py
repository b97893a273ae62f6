"""GivenModel: a script's model; a job trains a copy of it."""

from __future__ import annotations

import copy
from typing import Protocol

import torch
from torch import nn

from hvdtrain.config.schema import Config
from hvdtrain.core.adapters import is_adapter, merged
from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError
from hvdtrain.frameworks.torch.frozen import check_overlaps


class WeightsHolder(Protocol):
    """The interface through which a script's model gets weights from a learner."""

    config: Config
    model: torch.nn.Module

    def weights(self) -> Arrays: ...


class GivenModel:
    """Makes a job's model from a script's model: trains a copy, and copies its weights to the
    script's model at the end.

    The script's model does not change until take(); hooks, norms and parts of a job belong to the
    copy.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self) -> torch.nn.Module:
        """Copies the model. Raises UserError if it cannot be copied, or if two tensors share
        memory, which they would not in the copy."""
        check_overlaps(self.model, "hvdtrain.train(), model")
        try:
            model = copy.deepcopy(self.model)
        except Exception as error:
            what = (
                f"model={type(self.model).__name__} cannot be copied: {type(error).__name__}: "
                f"{error}"
            )
            raise UserError(
                what, "hvdtrain.train(), model", "a class or function that creates the model"
            ) from error
        for original, p in zip(self.model.parameters(), model.parameters(), strict=True):
            _copy_marks(original, p)
        return model

    def take(self, learner: WeightsHolder) -> None:
        """Copies the learner's weights and buffers into the script's model, which keeps its device
        and number type. A collective."""
        arrays = learner.weights()
        has_adapters = bool(learner.config.model.lora)
        if has_adapters:
            arrays = merged(arrays, learner.config.model.lora_scale)
        state = {
            name: torch.from_numpy(arrays[name])
            if name in arrays
            else value  # a module's extra state need not be an array
            for name, value in learner.model.state_dict().items()
            if not (has_adapters and is_adapter(name))
        }
        self.model.load_state_dict(state)
        self.model.train(learner.model.training)


def _copy_marks(original: nn.Parameter, p: nn.Parameter) -> None:
    """Attributes that a script has set, and hooks of its gradient, which a copy of a parameter
    lacks."""
    vars(p).update({name: value for name, value in vars(original).items() if name not in vars(p)})
    for hook in (original._backward_hooks or {}).values():
        p.register_hook(hook)
    for hook in (getattr(original, "_post_accumulate_grad_hooks", None) or {}).values():
        p.register_post_accumulate_grad_hook(hook)
