"""A torch model that a script gives: a copy of it is trained, and its weights become the model's at the end."""

from __future__ import annotations

import copy

import torch

from hvdtrain.errors import UserError


class GivenModel:
    """Makes the model of a job. The script's own stays as it is until give_back(): hooks and norms of a job are the copy's."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self._trained = model, model

    def __call__(self) -> torch.nn.Module:
        """Raises UserError where the model cannot be copied."""
        try:
            self._trained = copy.deepcopy(self.model)
        except Exception as error:
            what = f"model={type(self.model).__name__} cannot be copied: {type(error).__name__}: {error}"
            raise UserError(what, "hvdtrain.train(), model", "a class or function that makes the model") from error
        return self._trained

    def give_back(self) -> None:
        """Copies weights and buffers, on all ranks the same, into the script's own model, where that has its device and number type."""
        if self._trained is not self.model:
            self.model.load_state_dict(self._trained.state_dict())
            self.model.train(self._trained.training)
