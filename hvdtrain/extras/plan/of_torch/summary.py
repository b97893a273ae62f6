"""The layers of a model in the order of a forward pass: shapes, parameters, operations; computed on
tensors without data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hvdtrain.comm.communicator import SingleProcessCommunicator
from hvdtrain.config.schema import Config
from hvdtrain.errors import UserError, first_line
from hvdtrain.extras.plan.forecast.layers import LayerSummary
from hvdtrain.frameworks.torch.call import Called, call
from hvdtrain.frameworks.torch.check_outputs import example
from hvdtrain.frameworks.torch.model import normed_model
from hvdtrain.frameworks.torch.private_api import FakeTensorMode
from hvdtrain.frameworks.torch.step_costs import FlopCounter
from hvdtrain.frameworks.torch.without_numbers import Answered
from hvdtrain.tasks.task import Task

_SAMPLES = 2  # samples in the forward pass


def summarize(config: Config, task: Task) -> list[LayerSummary]:
    """Returns the modules that have parameters or operations themselves. Raises UserError if shapes
    depend on the values of tensors."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            with Answered():  # not in the forward pass, whose shapes may depend on values
                model = normed_model(config, task, SingleProcessCommunicator())
            return _Calls(model, example(_SAMPLES, config, task, torch.empty(0))).rows()
    except UserError:
        raise
    except Exception as error:  # an error in the user's model
        what = (
            f"{config.model.name} cannot run on tensors without data: {type(error).__name__}: "
            f"{first_line(error)}"
        )
        raise UserError(
            what,
            config.where("model.name"),
            "a model whose shapes do not depend on the values of tensors",
        ) from error


class _Calls:
    """Records the operations of each module in a forward pass."""

    def __init__(self, model: nn.Module, inputs: Called) -> None:
        self._model = model
        self._outputs: dict[nn.Module, Any] = {}
        self._flops: dict[nn.Module, int] = {}  # operations of each module, without its submodules
        self._inside: list[int] = []  # for each running call: operations of the calls within it
        hooks = [module.register_forward_pre_hook(self._begin) for module in model.modules()]
        hooks += [module.register_forward_hook(self._end) for module in model.modules()]
        self._began: list[int] = []
        try:
            with torch.no_grad(), FlopCounter() as self._counter:
                call(model.eval(), inputs)
        finally:
            for hook in hooks:
                hook.remove()

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._began.append(self._counter.flops)
        self._inside.append(0)

    def _end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        whole = self._counter.flops - self._began.pop()
        own = whole - self._inside.pop()
        if self._inside:
            self._inside[-1] += whole
        self._flops[module] = self._flops.get(module, 0) + own
        self._outputs[module] = outputs

    def rows(self) -> list[LayerSummary]:
        summaries = []
        seen = set[nn.Parameter]()
        for name, module in self._model.named_modules():
            own = [p for p in module.parameters(recurse=False) if p not in seen]
            seen.update(own)
            flops = self._flops.get(module, 0)
            if own or flops:
                trained = sum(p.numel() for p in own if p.requires_grad)
                outputs = _shape(self._outputs.get(module))
                summaries.append(
                    LayerSummary(
                        name,
                        type(module).__name__,
                        outputs,
                        sum(p.numel() for p in own),
                        trained,
                        flops // _SAMPLES,
                    )
                )
        return summaries


def _shape(outputs: Any) -> tuple[int, ...] | None:
    """Returns the shape of the first tensor for one sample; None if the module was not called or
    returns something else."""
    while isinstance(outputs, (tuple, list)) and outputs:
        outputs = outputs[0]
    return tuple(outputs.shape[1:]) if isinstance(outputs, torch.Tensor) else None
