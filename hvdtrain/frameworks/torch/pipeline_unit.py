"""Unit: the smallest part of a model that a rank may have while other ranks have the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Unit(NamedTuple):
    """The smallest part of a model that a stage may have: a function of one tensor (n, ...) to
    another one (n, ...)."""

    name: str
    modules: tuple[nn.Module, ...]  # modules whose parameters and buffers it uses
    call: Callable[[torch.Tensor], Any]  # the last unit returns the model's outputs
