"""A torch model that a script gives: a copy of it is trained, and its weights become the model's at the end."""

from __future__ import annotations

import copy
from typing import Protocol

import torch

from hvdtrain.core.arrays import Arrays
from hvdtrain.errors import UserError


class Trained(Protocol):
    """What a script's own model takes from a learner."""

    model: torch.nn.Module

    def weights(self) -> Arrays: ...


class GivenModel:
    """Makes the model of a job. The script's own stays as it is until take(): hooks, norms and parts of a job are the copy's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self) -> torch.nn.Module:
        """Raises UserError where the model cannot be copied."""
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            what = f"model={type(self.model).__name__} cannot be copied: {type(error).__name__}: {error}"
            raise UserError(what, "hvdtrain.train(), model", "a class or function that makes the model") from error

    def take(self, learner: Trained) -> None:
        """Copies the learner's weights and buffers into the script's model, which keeps its device and number type. A collective."""
        arrays = learner.weights()
        state = {
            name: torch.from_numpy(arrays[name]) if name in arrays else value  # a module's extra state is no array
            for name, value in learner.model.state_dict().items()
        }
        self.model.load_state_dict(state)
        self.model.train(learner.model.training)
