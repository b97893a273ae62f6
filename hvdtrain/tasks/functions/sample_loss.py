"""What is learned from, as a function of the user's own: the loss of each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Loss(NamedTuple):
    """What is learned from, of each sample."""

    of: Callable[[Any, Mapping[str, Any]], Any]  # (outputs, batch) -> (n,); a torch.nn.Module moves to the model's device
    facts: dict[str, Any]  # its plain values, which a checkpoint keeps
    ignore: int | None = None  # targets y of this value have no loss, and the mean is over the others


def is_torch_module(thing: Any) -> bool:
    """Whether it is a torch.nn.Module, without importing torch."""
    return any(kind.__module__ == "torch.nn.modules.module" and kind.__name__ == "Module" for kind in type(thing).__mro__)
