"""What a torch model is called with: one tensor, or several by the names of its parameters, or as a
dict."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.errors import UserError

Called = torch.Tensor | dict[str, torch.Tensor]  # (n, ...), or several of as many rows


def call(model: torch.nn.Module, inputs: Called) -> Any:
    """The outputs of a model: of several inputs by name where its forward() has parameters of these
    names, else as one dict."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    return model(**inputs) if takes_by_name(model, tuple(inputs)) else model(inputs)


def takes_by_name(model: torch.nn.Module, names: tuple[str, ...]) -> bool:
    """Whether forward() has parameters of all these names."""
    whole: Any = getattr(model, "_orig_mod", model)  # of torch.compile
    return set(names) <= _parameters(getattr(type(whole), "forward", None))


@functools.lru_cache(64)
def _parameters(forward: Any) -> frozenset[str]:
    """Names that it can be called with; none if its signature cannot be read, as that of
    TorchScript."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    )


def any_of(inputs: Called) -> torch.Tensor:
    """A tensor with as many rows, on the same device."""
    return inputs if isinstance(inputs, torch.Tensor) else next(iter(inputs.values()))


def only_one(inputs: Called) -> torch.Tensor:
    """The one input of a model that ranks have parts of. Raises UserError for several."""
    if isinstance(inputs, torch.Tensor):
        return inputs
    what = f"the model gets {', '.join(inputs)}, and parallel.* cuts models with one input"
    raise UserError(
        what, "parallel", "shard.stage=3 divides the weights of such a model among ranks"
    )


def each_of(inputs: Called, change: Callable[[torch.Tensor], torch.Tensor]) -> Called:
    """The inputs, each of them changed."""
    return (
        change(inputs)
        if isinstance(inputs, torch.Tensor)
        else {name: change(tensor) for name, tensor in inputs.items()}
    )


def shapes_of(inputs: Called) -> str:
    """For messages: (2, 3); image (2, 1, 8, 8), table (2, 3)"""
    if isinstance(inputs, torch.Tensor):
        return f"{tuple(inputs.shape)}"
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
