"""Rounds within torch.inference_mode(): what they keep from call to call has to be of use outside of it, too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def outside_of_inference(function: Callable[P, T]) -> Callable[P, T]:
    """The function, outside of the caller's torch.inference_mode(): tensors that are made in that mode cannot be changed after it."""

    @functools.wraps(function)
    def outside(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False):
            return function(*args, **kwargs)

    return outside
