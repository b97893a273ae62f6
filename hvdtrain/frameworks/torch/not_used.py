"""Notes on parts of a torch model that a job does not use: outputs without a loss, methods of other
trainers, parameters without decay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hvdtrain.config.schema import Config
from hvdtrain.frameworks.by_name import Activation, twice_activated
from hvdtrain.frameworks.torch.buffers import copied_buffers
from hvdtrain.frameworks.torch.call import call
from hvdtrain.frameworks.torch.check_outputs import zeros
from hvdtrain.frameworks.torch.device import fork_rng
from hvdtrain.frameworks.torch.forward import AddsLoss, first_of
from hvdtrain.optim.rule import is_excluded
from hvdtrain.tasks.task import DeviceAndDtype, Task, TaskPart, part_of

# methods of Lightning and similar libraries
_METHODS = ("training_step", "validation_step", "configure_optimizers")
_MOST = 4  # names in a line


def lines_of_not_used(
    model: nn.Module, config: Config, task: Task, like: torch.Tensor
) -> list[str]:
    """Returns the header lines of a user's model, without changing it. A collective if its forward
    pass is.

    like: a tensor with the device of the inputs and the dtype of the weights.
    """
    lines = _methods(model) + _without_decay(model, config)
    is_whole = config.shard.stage < 3 and not config.parallel.cuts
    if is_whole and not task.has_user_loss:  # which may use anything
        lines += _outputs(
            model,
            part_of(task, "torch", config, DeviceAndDtype(like.dtype, like.device)),
            zeros(2, task, like),
            twice_activated(config),
        )
    return lines


def _methods(model: nn.Module) -> list[str]:
    if methods := [name for name in _METHODS if callable(getattr(model, name, None))]:
        return [f"not used: {', '.join(f'{name}()' for name in methods)} of {type(model).__name__}"]
    return []


def _without_decay(model: nn.Module, config: Config) -> list[str]:
    """Returns decayed parameters that the model marks as not decayed, in the way of timm or of
    state space models."""
    if not config.optim.weight_decay or config.optim.groups:
        return []
    names = _no_weight_decay(model)
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    wanted = [
        (name, p)
        for name, p in parameters
        if name in names or getattr(p, "_no_weight_decay", False)
    ]
    excludes = config.optim.exclude == "norms_and_biases"
    if decayed := [name for name, p in wanted if not (excludes and is_excluded(tuple(p.shape)))]:
        fix = f"optim.groups=[{{names: {decayed[0]}, decay: 0}}]"
        return [
            f"not used: no_weight_decay of {_some(decayed)}, which "
            f"optim.weight_decay={config.optim.weight_decay:g} decays: {fix}"
        ]
    return []


def _no_weight_decay(model: nn.Module) -> set[str]:
    """Returns the names from the model's no_weight_decay(); none if that method does something
    else."""
    try:
        names = model.no_weight_decay()  # type: ignore[operator]
        return set() if isinstance(names, str) else {name for name in names if type(name) is str}
    except Exception:  # it has no such method, or a method with another purpose
        return set()


def _outputs(
    model: nn.Module, part: TaskPart, batch: dict[str, torch.Tensor], activation: Activation | None
) -> list[str]:
    """Returns training outputs and parameters that the task's loss does not depend on. activation:
    what the loss applies to the outputs; the model may already have applied it."""
    before = [(module, _plain_values(module)) for module in model.modules()]
    try:
        _train(model)
        with fork_rng(p.device for p in model.parameters()), copied_buffers(model):
            return _described(model, part, batch, activation)
    except Exception:  # the model does not accept samples of zeros; training reports that
        return []
    finally:
        for module, values in before:
            vars(module).update(values)


def _plain_values(module: nn.Module) -> dict[str, Any]:
    """Returns the module's mode and counters, to restore them after the check."""
    plain = (bool, int, float, str, type(None))
    return {name: value for name, value in vars(module).items() if isinstance(value, plain)}


def _train(model: nn.Module) -> None:
    """Sets training mode except for dropout, norms (whose statistics may be a collective) and Keras
    models, which keep their mode."""
    for module in model.modules():
        module.training = not isinstance(model, AddsLoss) and any(True for _ in module.children())


def _outputs_of_none(model: nn.Module, part: TaskPart, batch: dict[str, torch.Tensor]) -> Any:
    """Returns the outputs for an empty batch; None if the model does not accept one."""
    try:
        return call(model, part.inputs({name: field[:0] for name, field in batch.items()}))
    except Exception:
        return None


class _Activations(TorchFunctionMode):
    """Records the results of calls of one function, by its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.results: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == self._name:
            self.results.append(result)
        return result


def _described(
    model: nn.Module, part: TaskPart, batch: dict[str, torch.Tensor], activation: Activation | None
) -> list[str]:
    activations = _Activations(activation.name if activation else "")
    # in training mode without gradients: no pass that a model of the user's counts
    with torch.no_grad(), activations:
        outputs = _outputs_of_none(model, part, batch)
    lines = []
    if len(list(_tensors(outputs))) != 1:
        with activations:
            outputs = call(model, part.inputs(batch))
        lines = _without_effect(model, part, batch, outputs)
    last = first_of(outputs)
    is_twice = any(result is last for result in activations.results)
    return [activation.line, *lines] if activation and is_twice else lines


def _without_effect(
    model: nn.Module, part: TaskPart, batch: dict[str, torch.Tensor], outputs: Any
) -> list[str]:
    if len(list(_tensors(outputs))) < 2:
        return []
    named = dict(_tensors(outputs))
    main = first_of(outputs)
    loss = part.each(outputs, batch, training=True).loss.sum()
    others = {
        name: tensor
        for name, tensor in named.items()
        if tensor is not main and tensor.requires_grad
    }
    reached = (
        torch.autograd.grad(loss, list(others.values()), allow_unused=True, retain_graph=True)
        if others
        else ()
    )
    unused = [name for name, g in zip(others, reached, strict=True) if g is None]
    if not unused:
        return []
    line = f"not used: output {_some(unused)}, which the loss does not depend on"
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    of_loss = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    without = [name for name, g in zip(parameters, of_loss, strict=True) if g is None]
    return [f"{line}; no gradient for {_some(without)}" if without else line]


def _tensors(outputs: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the floating-point tensors in dicts, lists and tuples, by name or index: aux, 1,
    hidden_states.0."""
    if isinstance(outputs, torch.Tensor):
        if outputs.is_floating_point():
            yield path, outputs
    elif isinstance(outputs, Mapping):
        for name, one in outputs.items():
            yield from _tensors(one, f"{path}.{name}".lstrip("."))
    elif isinstance(outputs, (tuple, list)):
        names: Sequence[Any] = getattr(outputs, "_fields", range(len(outputs)))
        for name, one in zip(names, outputs, strict=True):
            yield from _tensors(one, f"{path}.{name}".lstrip("."))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST]) + (
        f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    )
