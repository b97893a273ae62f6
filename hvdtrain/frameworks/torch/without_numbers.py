"""Runs a model on tensors without numbers: what the host reads from one, copies of it, and no side
effects."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from hvdtrain.frameworks.torch.private_api import FakeTensorMode, TorchDispatchMode

# the host waits for it: float(tensor), `if mask.any()` of torch.nn.init
ASKS_FOR_NUMBER = torch.ops.aten._local_scalar_dense.default


@contextmanager
def side_effects_undone() -> Iterator[None]:
    """Restores torch's random generator, and keeps torch from logging what it cannot predict,
    because the caller raises it."""
    log = logging.getLogger(FakeTensorMode.__module__)
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        log.setLevel(level)


class CopiedWithoutNumbers(TorchFunctionMode):
    """Makes copy.deepcopy() work inside FakeTensorMode for tensors that are not parameters, such as
    buffers. Otherwise their numbers would be copied into a tensor without numbers."""

    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        if function is not torch.Tensor.__deepcopy__:
            return function(*arguments, **(options or {}))
        tensor, memo = arguments
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.clone()
        return memo[id(tensor)]


def answer(tensor: torch.Tensor) -> bool | float:
    """Returns the number that the host reads from a tensor without numbers: False (no gradient was
    bad), or 1 (the number of a step)."""
    if tensor.dtype == torch.bool:
        return False
    if tensor.is_floating_point():
        return 1.0
    return 1


class Answered(TorchDispatchMode):
    """A mode in which a tensor without numbers returns one when the host reads it. Initial weights
    that are redrawn until they fit need it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return answer(args[0]) if func is ASKS_FOR_NUMBER else func(*args, **(kwargs or {}))
