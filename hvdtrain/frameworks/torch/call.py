"""Calls torch models with one tensor, or with several as keyword arguments or as a dict."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from hvdtrain.data.packed import SEGMENTS, TOKENS
from hvdtrain.errors import UserError
from hvdtrain.tasks.torch import OPTIONAL

ATTENTION_MASK = "attention_mask"
# the parameters of a model of transformers that gets packed rows
PACKED_IN_TRANSFORMERS = ("input_ids", "position_ids")
Called = torch.Tensor | dict[str, torch.Tensor]  # (n, ...), or several tensors with n rows


def call(model: torch.nn.Module, inputs: Called) -> Any:
    """Calls a model; several inputs are keyword arguments if forward() has parameters of these
    names, else one dict. Optional inputs, and the mask of padding, are as in passed()."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    arguments = passed(model, inputs)
    return model(*arguments.positional, **arguments.named)


class Passed(NamedTuple):
    positional: tuple[Any, ...]
    named: Mapping[str, torch.Tensor]


def passed(model: torch.nn.Module, inputs: Called) -> Passed:
    """Returns the arguments of a call.

    An optional input is only for models that have a parameter of its name. A parameter
    attention_mask gets the mask of padding, if there is one, whatever its name in the data. Models
    of transformers get packed rows as position_ids.
    """
    if isinstance(inputs, torch.Tensor):
        return Passed((inputs,), {})
    names = _parameters(getattr(type(whole_of(model)), "forward", None))
    if inputs.keys() <= names:
        return Passed((), _as_numbers(inputs) if is_of_transformers(model) else inputs)
    if is_of_transformers(model) and set(inputs) == {TOKENS, SEGMENTS}:
        packed = (inputs[TOKENS], positions_of(inputs[SEGMENTS]))
        return Passed((), dict(zip(PACKED_IN_TRANSFORMERS, packed, strict=True)))
    required = required_of(inputs)
    further = {
        name.removeprefix(OPTIONAL): tensor
        for name, tensor in inputs.items()
        if name not in required and name.removeprefix(OPTIONAL) in names
    }
    mask = padding_mask(inputs)
    if mask and not further and ATTENTION_MASK in names and ATTENTION_MASK not in inputs:
        required.pop(mask, None)
        is_number = is_of_transformers(model)  # some of its models calculate with it
        further = {ATTENTION_MASK: inputs[mask].long() if is_number else inputs[mask]}
    if len(required) == 1 < len(inputs):
        return Passed(tuple(required.values()), further)
    if required.keys() <= names:
        return Passed((), {**required, **further})
    return Passed((required,), {})


def _as_numbers(inputs: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Returns the inputs of a model of transformers: some calculate with the mask of padding."""
    mask = inputs.get(ATTENTION_MASK)
    return inputs if mask is None else {**inputs, ATTENTION_MASK: mask.long()}


def padding_mask(inputs: Called) -> str:
    """Returns the name of the mask of another input, bool (n, T); empty if there is not one."""
    if isinstance(inputs, torch.Tensor):
        return ""
    masks = [name for name, x in inputs.items() if x.dtype == torch.bool and x.ndim == 2]
    others = [x for x in inputs.values() if x.dtype != torch.bool]
    is_one = len(masks) == 1 and any(x.shape[:2] == inputs[masks[0]].shape for x in others)
    return masks[0] if is_one else ""


def required_of(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the inputs that every model gets."""
    return {name: tensor for name, tensor in inputs.items() if not name.startswith(OPTIONAL)}


def whole_of(model: torch.nn.Module) -> Any:
    """Returns the model within torch.compile."""
    return getattr(model, "_orig_mod", model)


def is_of_transformers(model: torch.nn.Module) -> bool:
    """Whether the class of a model is one of transformers, or a subclass."""
    transformers: Any = sys.modules.get("transformers")
    return transformers is not None and isinstance(whole_of(model), transformers.PreTrainedModel)


def positions_of(segments: torch.Tensor) -> torch.Tensor:
    """Returns the position of each token in its sequence, from 0. segments: int64 (n, T), equal for
    tokens of the same sequence."""
    at = torch.arange(segments.shape[1], device=segments.device)
    begins = functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    positions: torch.Tensor = at - torch.where(begins, at, 0).cummax(1).values  # (n, T)
    return positions


def takes_by_name(model: torch.nn.Module, names: Iterable[str]) -> bool:
    """Whether forward() has parameters of all these names."""
    return set(names) <= _parameters(getattr(type(whole_of(model)), "forward", None))


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


def without_optional(inputs: Called) -> Called:
    """Returns what every model gets: one tensor if the others are optional, else the inputs."""
    if isinstance(inputs, torch.Tensor):
        return inputs
    required = required_of(inputs)
    return next(iter(required.values())) if len(required) == 1 < len(inputs) else required


def only_one(inputs: Called) -> torch.Tensor:
    """Returns the only input of a divided model. Raises UserError for several inputs."""
    if isinstance(plain := without_optional(inputs), torch.Tensor):
        return plain
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
    inputs = without_optional(inputs)
    if isinstance(inputs, torch.Tensor):
        return f"{tuple(inputs.shape)}"
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in inputs.items())
