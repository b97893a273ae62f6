"""A torch learner's state as arrays by name: weights, buffers, optimizer state and loss scale."""

from __future__ import annotations

import numpy as np
import torch

from hvdtrain.core.arrays import Arrays
from hvdtrain.frameworks.state import check_fit
from hvdtrain.frameworks.torch.optim import rule_optimizer
from hvdtrain.frameworks.torch.optim.rule_optimizer import RuleOptimizer
from hvdtrain.frameworks.torch.precision import LossScale, NoScale, load_loss_scale, without_loss_scale


class LearnerState:
    """The live tensors of a model, its optimizer and its loss scale."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, scale: NoScale | LossScale) -> None:
        self._model, self._optimizer, self._scale = model, optimizer, scale

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor that a resume needs, by the names of Learner.state()."""
        tensors: dict[str, torch.Tensor] = {f"p.{name}": p for name, p in self._model.named_parameters()}
        tensors |= {f"b.{name}": b for name, b in self._model.named_buffers()}
        optimizer_state = {
            f"s.{name}.{key}": tensor
            for name, p in self._trained()
            for key, tensor in rule_optimizer.optimizer_state(self._optimizer, p).items()
        }
        if optimizer_state:
            optimizer_state |= rule_optimizer.class_entry(self._optimizer)
        return tensors | optimizer_state | self._scale.tensors

    def state_dict_names(self) -> dict[str, str]:
        """As Learner.state_dict_names()."""
        ours = {id(tensor): name for name, tensor in self.tensors().items()}
        theirs = self._model.state_dict(keep_vars=True)  # buffers that are not persistent are not in it
        return {name: ours[id(tensor)] for name, tensor in theirs.items() if id(tensor) in ours}

    def load(self, state: Arrays) -> None:
        """As Learner.load(). Raises UserError where the state is of another model or another class of optimizer."""
        scale_state, state = state, without_loss_scale(state)
        rule_optimizer.check_class(self._optimizer, state)
        live = self.tensors()
        model_has = without_loss_scale({name: tensor.detach().cpu().numpy() for name, tensor in live.items()})
        state_has = state
        if not isinstance(self._optimizer, RuleOptimizer):  # the state of a user's class comes with its first step
            model_has, state_has = _without_optimizer(model_has), _without_optimizer(state)
        check_fit(model_has, state_has)
        load_loss_scale(self._scale, scale_state)
        with torch.no_grad():
            for name, tensor in live.items():
                if name in model_has:
                    tensor.copy_(torch.from_numpy(np.asarray(state[name])))
        for name, p in self._trained():
            prefix = f"s.{name}."
            arrays = {key.removeprefix(prefix): array for key, array in state.items() if key.startswith(prefix)}
            rule_optimizer.load_optimizer_state(self._optimizer, p, arrays)

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]


def _without_optimizer(state: Arrays) -> Arrays:
    return {name: array for name, array in state.items() if not name.startswith("s.")}
