"""Calls torch models with one tensor, or with several as keyword arguments or as a dict."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.errors import UserError

Called = torch.Tensor | dict[str, torch.Tensor]  # (n, ...), or several tensors with n rows


def call(model: torch.nn.Module, inputs: Called) -> Any:
    """Calls a model; several inputs are keyword arguments if forward() has parameters of these
    names, else one dict."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    return model(**inputs) if takes_by_name(model, tuple(inputs)) else model(inputs)


def takes_by_name(model: torch.nn.Module, names: tuple[str, ...]) -> bool:
    """Whether forward() has parameters of all these names."""
    whole: Any = getattr(model, "_orig_mod", model)  # set by torch.compile
    return set(names) <= _parameters(getattr(type(whole), "forward", None))


@functools.lru_cache(64)
def _parameters(forward: Any) -> frozenset[str]:
    """Returns the parameter names of forward(); none if its signature cannot be read, as in
    TorchScript."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    )


def any_of(inputs: Called) -> torch.Tensor:
    """Returns one of the inputs, for its number of rows and device."""
    return inputs if isinstance(inputs, torch.Tensor) else next(iter(inputs.values()))


def only_one(inputs: Called) -> torch.Tensor:
    """Returns the only input of a divided model. Raises UserError for several inputs."""
    if isinstance(inputs, torch.Tensor):
        return inputs
    what = (
        f"the model takes {', '.join(inputs)}, but parallel.* only supports models with one input"
    )
    raise UserError(
        what, "parallel", "shard.stage=3 divides the weights of such a model among ranks"
    )


def each_of(inputs: Called, change: Callable[[torch.Tensor], torch.Tensor]) -> Called:
    """Applies `change` to each input."""
    return (
        change(inputs)
        if isinstance(inputs, torch.Tensor)
        else {name: change(tensor) for name, tensor in inputs.items()}
    )


def shapes_of(inputs: Called) -> str:
    """Formats shapes for messages: (2, 3); image (2, 1, 8, 8), table (2, 3)."""
    if isinstance(inputs, torch.Tensor):
        return f"{tuple(inputs.shape)}"
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
